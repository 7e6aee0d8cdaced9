"""Shapes of published models, and what they cost. Needs no packages."""

import json
import math
import struct
from pathlib import Path

# Decoder shapes as published in each model's config.json.
SHAPES = {
    "qwen3-0.6b": ("qwen3", dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
        max_position_embeddings=409600, rope_theta=1e6)),
    "qwen3-1.7b": ("qwen3", dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
        max_position_embeddings=409600, rope_theta=1e6)),
    "qwen3-8b": ("qwen3", dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False,
        max_position_embeddings=409600, rope_theta=1e6)),
    "llama-3.1-8b": ("llama", dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
        max_position_embeddings=131072, rope_theta=5e5)),
    # Small ones with every option, for parity.
    "tiny-llama": ("llama", dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=4000, tie_word_embeddings=False,
        max_position_embeddings=40960, rope_theta=1e4)),
    "tiny-qwen2": ("qwen2", dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=4000, tie_word_embeddings=True,
        max_position_embeddings=40960, rope_theta=1e6, use_sliding_window=False)),
    "tiny-mistral": ("mistral", dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=128, vocab_size=4000, tie_word_embeddings=False,
        max_position_embeddings=40960, rope_theta=1e6, sliding_window=200)),
    "tiny-llama3": ("llama", dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=4000, tie_word_embeddings=False,
        max_position_embeddings=40960, rope_theta=5e5, rope_scaling=dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256))),
    "tiny-qwen3": ("qwen3", dict(hidden_size=640, intermediate_size=1792, num_hidden_layers=4,
        num_attention_heads=10, num_key_value_heads=2, head_dim=128, vocab_size=5000, tie_word_embeddings=True,
        max_position_embeddings=40960, rope_theta=1e6)),
    "tiny-gemma3": ("gemma3_text", dict(hidden_size=640, intermediate_size=1792, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=256, vocab_size=5000, tie_word_embeddings=True,
        max_position_embeddings=40960, rope_theta=1e6, rope_local_base_freq=1e4, query_pre_attn_scalar=256, sliding_window=200,
        layer_types=["sliding_attention"] * 5 + ["full_attention"], hidden_activation="gelu_pytorch_tanh")),
    "tiny-qwen35": ("qwen3_5_text", dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=256, vocab_size=5000, tie_word_embeddings=True,
        max_position_embeddings=40960, rope_parameters=dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.25),
        attn_output_gate=True, full_attention_interval=2, linear_num_key_heads=4, linear_num_value_heads=8,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4)),
}
# Models and modes whose kernels have not all run on a GPU: they need the option `experimental`.
EXPERIMENTAL = {"tiny-gemma3", "tiny-qwen35"}


def attention_layers(s: dict) -> int:
    """Layers with attention; the others are recurrent."""
    return s["num_hidden_layers"] // s.get("full_attention_interval", 1)


def weights_bytes(name: str) -> int:
    """Bytes of the weights that one decode step reads: all but the embedding, unless it is the head."""
    _, s = SHAPES[name]
    heads, kv = s["num_attention_heads"], s["num_key_value_heads"]
    head_dim = s.get("head_dim") or s["hidden_size"] // heads
    h, inner = s["hidden_size"], s["intermediate_size"]
    gated = 2 if s.get("attn_output_gate") else 1
    attention = h * head_dim * (gated * heads + 2 * kv) + heads * head_dim * h
    layers = s["num_hidden_layers"]
    recurrent = layers - attention_layers(s)
    mixers = attention * (layers - recurrent)
    if recurrent:
        mixers += recurrent * sum(math.prod(shape) for shape in recurrent_parameters(s).values() if len(shape) > 1)
    return 2 * (mixers + 3 * h * inner * layers + s["vocab_size"] * h)


def file_bytes(name: str) -> int:
    """Bytes of its checkpoint in a 16-bit type."""
    _, s = SHAPES[name]
    embeddings = 1 if s["tie_word_embeddings"] else 2
    return weights_bytes(name) + 2 * (embeddings - 1) * s["vocab_size"] * s["hidden_size"]


def kv_bytes_per_token(name: str, fp8: bool = False) -> int:
    _, s = SHAPES[name]
    head_dim = s.get("head_dim") or s["hidden_size"] // s["num_attention_heads"]
    return 2 * attention_layers(s) * s["num_key_value_heads"] * (head_dim + 4 if fp8 else head_dim * 2)


def attention_flops(name: str, tokens: int, keys: int) -> float:
    """Of both products, for so many queries that all see so many keys."""
    _, s = SHAPES[name]
    head_dim = s.get("head_dim") or s["hidden_size"] // s["num_attention_heads"]
    return 4.0 * tokens * keys * s["num_attention_heads"] * head_dim * attention_layers(s)


def recurrent_parameters(s: dict) -> dict:
    """Shape of each tensor of a recurrent layer."""
    key_heads, value_heads = s["linear_num_key_heads"], s["linear_num_value_heads"]
    values = value_heads * s["linear_value_head_dim"]
    channels = 2 * key_heads * s["linear_key_head_dim"] + values
    hidden = s["hidden_size"]
    return {"in_proj_qkv.weight": (channels, hidden), "in_proj_z.weight": (values, hidden), "in_proj_b.weight": (value_heads, hidden),
            "in_proj_a.weight": (value_heads, hidden), "conv1d.weight": (channels, 1, s["linear_conv_kernel_dim"]),
            "A_log": (value_heads,), "dt_bias": (value_heads,), "norm.weight": (s["linear_value_head_dim"],),
            "out_proj.weight": (hidden, values)}


def parameters(name: str) -> dict:
    """Shape of each tensor of the checkpoint."""
    kind, s = SHAPES[name]
    hidden, inner, heads, kv_heads = s["hidden_size"], s["intermediate_size"], s["num_attention_heads"], s["num_key_value_heads"]
    head_dim = s.get("head_dim") or hidden // heads
    shapes = {"model.embed_tokens.weight": (s["vocab_size"], hidden)}
    interval = s.get("full_attention_interval", 1)
    for index in range(s["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes |= {layer + "input_layernorm.weight": (hidden,), layer + "post_attention_layernorm.weight": (hidden,),
                   layer + "mlp.gate_proj.weight": (inner, hidden), layer + "mlp.up_proj.weight": (inner, hidden),
                   layer + "mlp.down_proj.weight": (hidden, inner)}
        if (index + 1) % interval:
            shapes |= {layer + "linear_attn." + tensor: shape for tensor, shape in recurrent_parameters(s).items()}
            continue
        gated = 2 if s.get("attn_output_gate") else 1
        shapes |= {layer + "self_attn.q_proj.weight": (gated * heads * head_dim, hidden),
                   layer + "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
                   layer + "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
                   layer + "self_attn.o_proj.weight": (hidden, heads * head_dim)}
        if kind == "qwen2":
            shapes |= {layer + f"self_attn.{part}_proj.bias": (count * head_dim,)
                       for part, count in [("q", heads), ("k", kv_heads), ("v", kv_heads)]}
        if kind == "gemma3_text":
            shapes |= {layer + f"{place}_feedforward_layernorm.weight": (hidden,) for place in ["pre", "post"]}
        if kind in ("qwen3", "gemma3_text", "qwen3_5_text"):
            shapes |= {layer + "self_attn.q_norm.weight": (head_dim,), layer + "self_attn.k_norm.weight": (head_dim,)}
    shapes["model.norm.weight"] = (hidden,)
    if not s["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (s["vocab_size"], hidden)
    return shapes


def config(name: str, dtype: str) -> dict:
    """What is in the checkpoint's config.json."""
    kind, s = SHAPES[name]
    heads = s["num_attention_heads"]
    architecture = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM",
                    "mistral": "MistralForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM"}[kind]
    return {"architectures": [architecture], "model_type": kind, "rope_scaling": None, **s,
            "head_dim": s.get("head_dim") or s["hidden_size"] // heads, "torch_dtype": dtype, "bos_token_id": 0, "eos_token_id": 1,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
            "initializer_range": 0.02, "use_cache": True}


def write_configuration(name: str, path: Path, dtype: str):
    """All of a checkpoint but its weights. The tokenizer comes last: with it the checkpoint is complete."""
    vocabulary = SHAPES[name][1]["vocab_size"]
    (path / "config.json").write_text(json.dumps(config(name, dtype), indent=1))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    # No text is ever tokenized, but what is generated is turned into some: every id has a word.
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": byte_level,
                 "post_processor": None, "decoder": byte_level,
                 "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(vocabulary)}, "merges": [], "unk_token": "t0"}}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


def make_hollow(name: str, folder: Path, dtype: str = "bfloat16") -> Path:
    """A checkpoint whose weights are all zero and take no room on the disk: to rehearse with, without torch."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    header, at = {}, 0
    for tensor, shape in parameters(name).items():
        size = 2 * math.prod(shape)
        kind = {"bfloat16": "BF16", "float16": "F16"}[dtype]
        header[tensor] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    write_configuration(name, path, dtype)
    return path
