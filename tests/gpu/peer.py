"""Output tokens a second of transformers' continuous batching, on the same weights and lengths."""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def main() -> None:
    path, lengths_file = sys.argv[1:3]
    with open(lengths_file) as file:
        lengths = json.load(file)
    model = None
    for attention in ["paged|flash_attention_2", "paged|sdpa", "sdpa_paged", "sdpa"]:
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation=attention)
            break
        except Exception as error:  # Names differ between releases; the next one may be known.
            print(f"{attention}: {error}", file=sys.stderr)
    if model is None:
        sys.exit("no attention implementation works")
    model = model.cuda().eval()
    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, vocabulary, (prompt,), generator=generator).tolist() for prompt, _ in lengths]

    def run(count):
        # One limit holds for all requests of a call, so they are grouped by output length, longest group first.
        tokens = 0
        groups = {}
        for i, (_, output) in enumerate(lengths[:count]):
            groups.setdefault(1 << (output - 1).bit_length(), []).append(i)
        for limit in sorted(groups, reverse=True):
            config = GenerationConfig(max_new_tokens=limit, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True)
            with torch.inference_mode():
                outputs = model.generate_batch(inputs=[prompts[i] for i in groups[limit]], generation_config=config)
            tokens += sum(len(output.generated_tokens) for output in outputs.values())
        return tokens

    run(8)
    torch.cuda.synchronize()
    begun = time.monotonic()
    tokens = run(len(lengths))
    torch.cuda.synchronize()
    seconds = time.monotonic() - begun
    print(json.dumps({"output_tokens": tokens, "seconds": seconds, "output_tokens_per_second": tokens / seconds,
                      "attention": model.config._attn_implementation}))


if __name__ == "__main__":
    main()
