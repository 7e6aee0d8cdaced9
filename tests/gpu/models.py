"""Random-weight checkpoints in the shapes of published models, made on the spot by transformers."""

import gc
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

# Decoder shapes as published in each model's config.json.
SHAPES = {
    "qwen3-0.6b": (Qwen3Config, dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
        max_position_embeddings=409600, rope_theta=1e6)),
    "qwen3-1.7b": (Qwen3Config, dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
        max_position_embeddings=409600, rope_theta=1e6)),
    "qwen3-8b": (Qwen3Config, dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False,
        max_position_embeddings=409600, rope_theta=1e6)),
    "llama-3.1-8b": (LlamaConfig, dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
        max_position_embeddings=131072, rope_theta=5e5)),
    # Small ones with every option, for parity.
    "tiny-llama": (LlamaConfig, dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=4000, tie_word_embeddings=False,
        max_position_embeddings=40960, rope_theta=1e4)),
    "tiny-qwen3": (Qwen3Config, dict(hidden_size=640, intermediate_size=1792, num_hidden_layers=4,
        num_attention_heads=10, num_key_value_heads=2, head_dim=128, vocab_size=5000, tie_word_embeddings=True,
        max_position_embeddings=40960, rope_theta=1e6)),
}


def weights_bytes(name: str) -> int:
    """Bytes of the weights that one decode step reads: all but the embedding, unless it is the head."""
    _, s = SHAPES[name]
    heads, kv = s["num_attention_heads"], s["num_key_value_heads"]
    head_dim = s.get("head_dim") or s["hidden_size"] // heads
    h, inner = s["hidden_size"], s["intermediate_size"]
    layer = h * head_dim * (heads + 2 * kv) + heads * head_dim * h + 3 * h * inner
    return 2 * (layer * s["num_hidden_layers"] + s["vocab_size"] * h)


def file_bytes(name: str) -> int:
    """Bytes of its checkpoint in a 16-bit type."""
    _, s = SHAPES[name]
    embeddings = 1 if s["tie_word_embeddings"] else 2
    return weights_bytes(name) + 2 * (embeddings - 1) * s["vocab_size"] * s["hidden_size"]


def kv_bytes_per_token(name: str, fp8: bool = False) -> int:
    _, s = SHAPES[name]
    head_dim = s.get("head_dim") or s["hidden_size"] // s["num_attention_heads"]
    return 2 * s["num_hidden_layers"] * s["num_key_value_heads"] * (head_dim + 4 if fp8 else head_dim * 2)


def attention_flops(name: str, tokens: int, keys: int) -> float:
    """Of both products, for so many queries that all see so many keys."""
    _, s = SHAPES[name]
    head_dim = s.get("head_dim") or s["hidden_size"] // s["num_attention_heads"]
    return 4.0 * tokens * keys * s["num_attention_heads"] * head_dim * s["num_hidden_layers"]


def make(name: str, folder: Path, dtype=torch.bfloat16, seed: int = 0) -> Path:
    """Writes the checkpoint, once."""
    path = folder / name
    if (path / "tokenizer.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    kind, shape = SHAPES[name]
    config = kind(**shape, bos_token_id=0, eos_token_id=1)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Norms are not 1 everywhere, that a forgotten one shows; matrices keep the size of what goes in.
            if parameter.dim() == 1:
                parameter.uniform_(0.7, 1.3)
            elif "embed" not in parameter_name:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(0.0, 1.0 if not shape["tie_word_embeddings"] else shape["hidden_size"] ** -0.5)
    model.to(dtype).save_pretrained(path, max_shard_size="8GB")
    del model
    gc.collect()  # modules may refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    # No text is ever tokenized, but what is generated is turned into some: every id has a word.
    vocabulary = {f"t{i}": i for i in range(shape["vocab_size"])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": byte_level,
                 "post_processor": None, "decoder": byte_level,
                 "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "t0"}}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path
