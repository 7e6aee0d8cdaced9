#!/usr/bin/env python3
"""Runs llama.cpp's own converter on a checkpoint of checkpoint.py, whose tokenizer the converter's table of known ones does not list.

    to_gguf.py LLAMA_CPP_DIR CHECKPOINT OUT.gguf DTYPE
"""

import runpy
import sys
from pathlib import Path


def main():
    source, checkpoint, out, dtype = sys.argv[1:5]
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    script = str(Path(source) / "convert_hf_to_gguf.py")
    sys.argv = [script, checkpoint, "--outfile", out, "--outtype", dtype]
    if "Qwen3_5" in (Path(checkpoint) / "config.json").read_text():
        # The checkpoint has no layer of multi-token prediction.
        sys.argv.append("--no-mtp")
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
