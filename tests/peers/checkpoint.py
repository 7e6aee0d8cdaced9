#!/usr/bin/env python3
"""Writes a checkpoint with random weights, of the shape of a known model, and a tokenizer of its vocabulary size.

What a model says does not matter to how fast it says it; nothing is downloaded. Needs torch and safetensors.

    checkpoint.py 135m DIR
"""

import argparse
import json
from pathlib import Path

# Name: hidden, layers, query heads, key and value heads, intermediate, vocabulary, head shared with the embedding.
SHAPES = {
    "135m": (576, 30, 9, 3, 1536, 49152, True),
    "0.5b": (896, 24, 14, 2, 4864, 32000, True),
    "1.1b": (2048, 22, 32, 4, 5632, 32000, False),
}
# Of Qwen3.5, of which three of four layers are recurrent, with heads of 256 in the others: heads of keys and of values of the recurrent layers,
# each of 128. The other numbers are those of SHAPES.
HYBRID_SHAPES = {
    "qwen3.5-0.8b": ((1024, 24, 8, 2, 3584, 248320, True), (16, 16)),
    "qwen3.5-4b": ((2560, 32, 16, 4, 9216, 248320, True), (16, 32)),
}
ALL_SHAPES = SHAPES | {name: shape for name, (shape, _) in HYBRID_SHAPES.items()}
DELTA_DIM = 128
TAPS = 4
CONTEXT_TOKENS = 2048
SPECIALS = ["<|begin|>", "<|end|>"]


def byte_alphabet():
    """The characters that byte-level tokenizers write bytes with (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def tokenizer(vocab_size):
    """A byte-level BPE tokenizer of pairs of letters, then of pairs of pairs, until the vocabulary is full."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = SPECIALS + byte_alphabet()
    merges = []

    def merge(left, right):
        merges.append([left, right])
        tokens.append(left + right)

    pairs = [(left, right) for left in letters for right in letters]
    for left, right in pairs:
        merge(left, right)
    for letter in letters:
        merge("Ġ", letter)
    for left in pairs:
        for right in pairs:
            if len(tokens) == vocab_size:
                break
            merge("".join(left), "".join(right))
    assert len(tokens) == vocab_size == len(set(tokens))
    special = [
        {"id": at, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for at, token in enumerate(SPECIALS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: at for at, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def weights(shape, seed):
    import torch

    hidden, layers, heads, kv_heads, intermediate, vocab, tied = shape
    head = hidden // heads
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return (torch.randn(*size, generator=generator) * 0.02).to(torch.bfloat16)

    def ones():
        return torch.ones(hidden, dtype=torch.bfloat16)

    def vocabulary():
        matrix = normal(vocab, hidden)
        # Special tokens, and bytes that are no characters by themselves, are never the most probable: an endless run of them would
        # be text that servers hold back, waiting for its end.
        rare = [*range(len(SPECIALS)), *(len(SPECIALS) + byte for byte in range(256) if not 32 <= byte < 127)]
        matrix[rare] *= 2.0**-6
        return matrix

    tensors = {"model.embed_tokens.weight": vocabulary(), "model.norm.weight": ones()}
    if not tied:
        tensors["lm_head.weight"] = vocabulary()
    for layer in range(layers):
        name = f"model.layers.{layer}."
        tensors |= {
            name + "input_layernorm.weight": ones(),
            name + "post_attention_layernorm.weight": ones(),
            name + "self_attn.q_proj.weight": normal(heads * head, hidden),
            name + "self_attn.k_proj.weight": normal(kv_heads * head, hidden),
            name + "self_attn.v_proj.weight": normal(kv_heads * head, hidden),
            name + "self_attn.o_proj.weight": normal(hidden, heads * head),
            name + "mlp.gate_proj.weight": normal(intermediate, hidden),
            name + "mlp.up_proj.weight": normal(intermediate, hidden),
            name + "mlp.down_proj.weight": normal(hidden, intermediate),
        }
    return tensors


def hybrid_weights(shape, delta, seed):
    import torch

    hidden, layers, heads, kv_heads, intermediate, vocab, _ = shape
    key_heads, value_heads = delta
    tensors = weights((hidden, 0, 1, 1, intermediate, vocab, True), seed)
    # Zero-centred.
    tensors["model.norm.weight"] = torch.zeros(hidden, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed + 1)

    def normal(*size):
        return (torch.randn(*size, generator=generator) * 0.02).to(torch.bfloat16)

    def zeros(size):
        return torch.zeros(size, dtype=torch.bfloat16)

    values = value_heads * DELTA_DIM
    channels = 2 * key_heads * DELTA_DIM + values
    for layer in range(layers):
        name = f"model.layers.{layer}."
        tensors |= {
            name + "input_layernorm.weight": zeros(hidden),
            name + "post_attention_layernorm.weight": zeros(hidden),
            name + "mlp.gate_proj.weight": normal(intermediate, hidden),
            name + "mlp.up_proj.weight": normal(intermediate, hidden),
            name + "mlp.down_proj.weight": normal(hidden, intermediate),
        }
        if (layer + 1) % 4 == 0:
            # Queries and their gates.
            tensors |= {
                name + "self_attn.q_proj.weight": normal(2 * heads * 256, hidden),
                name + "self_attn.k_proj.weight": normal(kv_heads * 256, hidden),
                name + "self_attn.v_proj.weight": normal(kv_heads * 256, hidden),
                name + "self_attn.o_proj.weight": normal(hidden, heads * 256),
                name + "self_attn.q_norm.weight": zeros(256),
                name + "self_attn.k_norm.weight": zeros(256),
            }
            continue
        tensors |= {
            name + "linear_attn.in_proj_qkv.weight": normal(channels, hidden),
            name + "linear_attn.in_proj_z.weight": normal(values, hidden),
            name + "linear_attn.in_proj_b.weight": normal(value_heads, hidden),
            name + "linear_attn.in_proj_a.weight": normal(value_heads, hidden),
            name + "linear_attn.conv1d.weight": normal(channels, 1, TAPS),
            name + "linear_attn.A_log": torch.rand(value_heads, generator=generator).to(torch.bfloat16),
            name + "linear_attn.dt_bias": normal(value_heads),
            name + "linear_attn.norm.weight": torch.ones(DELTA_DIM, dtype=torch.bfloat16),
            name + "linear_attn.out_proj.weight": normal(hidden, values),
        }
    return tensors


def copied_mtp(tensors, hidden, heads, kv_heads, intermediate):
    """Adds an MTP layer that predicts exactly what the model continues with: no layer adds to the embedding of the last token. What is
    computed, and how long it takes, is as with other weights."""
    import torch

    def zeros(*size):
        return torch.zeros(size, dtype=torch.bfloat16)

    def normal(*size):
        return (torch.randn(*size) * 0.02).to(torch.bfloat16)

    for name in [name for name in tensors if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))]:
        tensors[name] = zeros(*tensors[name].shape)
    name = "mtp.layers.0."
    return tensors | {
        "mtp.fc.weight": torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1).to(torch.bfloat16),
        **{f"mtp.{norm}.weight": zeros(hidden) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
        name + "input_layernorm.weight": zeros(hidden),
        name + "post_attention_layernorm.weight": zeros(hidden),
        name + "self_attn.q_proj.weight": normal(2 * heads * 256, hidden),
        name + "self_attn.k_proj.weight": normal(kv_heads * 256, hidden),
        name + "self_attn.v_proj.weight": normal(kv_heads * 256, hidden),
        name + "self_attn.o_proj.weight": zeros(hidden, heads * 256),
        name + "self_attn.q_norm.weight": zeros(256),
        name + "self_attn.k_norm.weight": zeros(256),
        name + "mlp.gate_proj.weight": normal(intermediate, hidden),
        name + "mlp.up_proj.weight": normal(intermediate, hidden),
        name + "mlp.down_proj.weight": zeros(hidden, intermediate),
    }


def hybrid_config(delta):
    key_heads, value_heads = delta
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": DELTA_DIM,
        "linear_value_head_dim": DELTA_DIM,
        "linear_conv_kernel_dim": TAPS,
    }


def write(shape_name, folder, seed=0, mtp=False):
    """Writes the checkpoint."""
    from safetensors.torch import save_file

    shape, delta = HYBRID_SHAPES.get(shape_name) or (SHAPES[shape_name], None)
    hidden, layers, heads, kv_heads, intermediate, vocab, tied = shape
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_TOKENS,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    if delta:
        config = {name: value for name, value in config.items() if name not in ("rope_theta", "mlp_bias")} | hybrid_config(delta)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
    }
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False},
        "tokenizer_config.json": tokenizer_config,
        "tokenizer.json": tokenizer(vocab),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    tensors = hybrid_weights(shape, delta, seed) if delta else weights(shape, seed)
    if mtp:
        config["mtp_num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        tensors = copied_mtp(tensors, hidden, heads, kv_heads, intermediate)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=ALL_SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mtp", action="store_true", help="with an MTP layer whose drafts all stand; hybrids only")
    arguments = parser.parse_args()
    if arguments.mtp and arguments.shape not in HYBRID_SHAPES:
        parser.error("--mtp is for hybrids")
    count = write(arguments.shape, arguments.folder, arguments.seed, arguments.mtp)
    print(f"{arguments.shape}: {count / 1e6:.1f} M parameters in {arguments.folder}")


if __name__ == "__main__":
    main()
