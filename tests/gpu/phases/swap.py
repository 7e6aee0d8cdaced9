"""Whole blocks between the GPU and the host, alone and beside decoding."""

import shapes


def swap(suite):
    name = "qwen3-0.6b" if suite.quick else "llama-3.1-8b"
    path = suite.model(name)
    block = shapes.kv_bytes_per_token(name) * 16
    blocks = max(1, (512 << 20) // block)
    task = {"swap": {"blocks": blocks, "transfers": 8, "sequences": 64, "context": 1024, "steps": 100}}
    result = suite.job("swap", path, task, 300, slots=64, batch_tokens=4096, context_tokens=4096,
                       host_bytes=2 * blocks * block)
    suite.json["phases"]["swap"] = result
    one = result["blocks_moved"] * block / 1e9
    for what, key, factor in [("to the host", "out_seconds", 1), ("from the host", "in_seconds", 1),
                              ("both ways at once", "both_seconds", 2)]:
        rate = factor * one / result[key]
        suite.row("swap", what, f"{rate:.1f} GB/s, blocks of {block / (1 << 20):.2f} MiB", "45" if factor == 1 else "",
                  rate >= 45 if factor == 1 else None)
    slower = result["decode_ms_beside_swaps"] / result["decode_ms_calm"] - 1
    beside = result["blocks_beside"] * block / result["beside_seconds"] / 1e9
    suite.row("swap", f"{name}: decoding of 64 beside swaps", f"{100 * slower:+.1f} %, {beside:.1f} GB/s meanwhile",
              "< 10 %", slower < 0.10)
