#!/usr/bin/env python3
"""Trains a small Qwen3.5 with a layer of multi-token prediction (MTP) on the texts of the demo model, to measure drafts.

    python mtp_head.py FOLDER --minutes 20

Needs torch, transformers, tokenizers and safetensors. The model answers like a worse demo model; it exists for the acceptance of its MTP
layer: the loss is that of the next token plus 0.3 times that of the layer's, as in DeepSeek-V3.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

DEMO = Path(__file__).resolve().parents[2] / "worker/demo"
sys.path.insert(0, str(DEMO / "train"))
import train as demo  # noqa: E402

WIDTH, ROWS, PEAK = 160, 16, 2e-3
CONFIG = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "full_attention_interval": 4,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True,
}


class Mtp(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (qwen.Qwen3_5RMSNorm(width, eps=eps) for _ in range(3))
        self.layers = torch.nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, config.num_hidden_layers - 1)])

    def forward(self, embedded, hidden, rotary, mask):
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1)
        out = self.layers[0](self.fc(joined), position_embeddings=rotary, attention_mask=mask)
        return self.norm(out[0] if isinstance(out, tuple) else out)


def batches(corpus, tokenizer):
    """Endless rows of WIDTH + 1 tokens, of documents one behind the other."""
    tokens = []
    while True:
        while len(tokens) < ROWS * (WIDTH + 1):
            for ids, _ in demo.encode(tokenizer, [corpus.document() for _ in range(64)]):
                tokens += ids
        used = ROWS * (WIDTH + 1)
        yield torch.tensor(tokens[:used]).view(ROWS, WIDTH + 1)
        tokens = tokens[used:]


def losses(net, mtp, rows):
    """Losses of the model and of the MTP layer."""
    hidden = net.model(rows[:, :-1], use_cache=False).last_hidden_state
    loss = F.cross_entropy(net.lm_head(hidden).flatten(0, 1), rows[:, 1:].flatten())
    # Behind state j and token j + 1, token j + 2.
    embedded = net.model.embed_tokens(rows[:, 1:-1])
    count = embedded.shape[1]
    rotary = net.model.rotary_emb(embedded, torch.arange(count)[None, None].expand(3, 1, -1))
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    out = mtp(embedded, hidden[:, :-1], rotary, mask)
    return loss, F.cross_entropy(net.lm_head(out).flatten(0, 1), rows[:, 2:].flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    config = Qwen3_5TextConfig(**CONFIG)
    config._attn_implementation = "eager"
    net, mtp = qwen.Qwen3_5ForCausalLM(config), Mtp(config)
    net.lm_head.weight = net.model.embed_tokens.weight
    for module in mtp.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.02)
    weights = [*net.parameters(), *mtp.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=PEAK, betas=(0.9, 0.95), weight_decay=0.05)
    rows = batches(demo.Corpus(1), Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    begun, step = time.monotonic(), 0
    while (part := (time.monotonic() - begun) / (60 * arguments.minutes)) < 1:
        optimizer.param_groups[0]["lr"] = PEAK * min(1, (step + 1) / 50) * max(0.05, 1 - part)
        loss, of_mtp = losses(net, mtp, next(rows))
        optimizer.zero_grad(set_to_none=True)
        (loss + 0.3 * of_mtp).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            print(f"{step} steps, {100 * part:.0f} %: loss {loss:.3f}, of the MTP layer {of_mtp:.3f}", flush=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach() for name, tensor in net.state_dict().items() if name != "lm_head.weight"}
    tensors |= {f"mtp.{name}": tensor.detach() for name, tensor in mtp.state_dict().items()}
    save_file({name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}, arguments.folder / "model.safetensors")
    described = CONFIG | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "dtype": "bfloat16"}
    (arguments.folder / "config.json").write_text(json.dumps(described, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, arguments.folder / name)


if __name__ == "__main__":
    main()
