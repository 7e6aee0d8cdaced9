"""Random-weight checkpoints in the shapes of published models, made on the spot: `models.py FOLDER DTYPE NAME...`

Tensor by tensor on the GPU if there is one, which then needs little memory and some seconds for 16 GB.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from shapes import EXPERIMENTAL, SHAPES, parameters, write_configuration

SHARD_BYTES = 4 << 30


def make(name: str, folder: Path, dtype=torch.bfloat16, seed: int = 0) -> Path:
    """Writes the checkpoint, once."""
    path = folder / name
    if (path / "tokenizer.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    tied, hidden = (SHAPES[name][1][key] for key in ["tie_word_embeddings", "hidden_size"])

    def tensor(parameter, shape):
        values = torch.empty(shape, dtype=dtype, device=device)
        # Norms are not 1 everywhere, that a forgotten one shows; matrices keep the size of what goes in.
        if parameter.endswith("bias"):
            values.normal_(0.0, 0.5, generator=generator)
        elif parameter.endswith("A_log"):
            # States that last from some positions to some hundred.
            values.uniform_(-5.0, 0.0, generator=generator)
        elif len(shape) == 1:
            # Norms of Gemma and Qwen 3.5 are stored less 1; the other vectors of recurrent layers are not.
            low = -0.3 if name in EXPERIMENTAL and "linear_attn" not in parameter else 0.7
            values.uniform_(low, low + 0.6, generator=generator)
        elif "conv1d" in parameter:
            values.normal_(0.0, shape[-1] ** -0.5, generator=generator)
        elif "embed" in parameter:
            values.normal_(0.0, hidden**-0.5 if tied else 1.0, generator=generator)
        else:
            values.normal_(0.0, shape[1] ** -0.5, generator=generator)
        return values.cpu()

    shards, filled = [[]], 0
    for parameter, shape in parameters(name).items():
        size = 2 * torch.Size(shape).numel()
        if filled and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append((parameter, shape))
        filled += size
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards):
        save_file({parameter: tensor(parameter, shape) for parameter, shape in shard}, path / file, metadata={"format": "pt"})
    places = {parameter: file for file, shard in zip(files, shards) for parameter, _ in shard}
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    if device == "cuda":
        torch.cuda.empty_cache()
    write_configuration(name, path, str(dtype).removeprefix("torch."))
    return path


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit("models.py FOLDER DTYPE NAME...")
    folder, dtype = sys.argv[1:3]
    for name in sys.argv[3:]:
        make(name, Path(folder), getattr(torch, dtype))


if __name__ == "__main__":
    main()
