"""What torch's own kernels take for the shapes of an 8B model: attention of prompts by cuDNN and by flash attention, and products in 8
bits. They tell what this card can do, not what another engine does."""

import shapes
from phases.ceilings import timed
from recorder import Skipped

# Tokens of a prompt, and tokens before them.
PROMPTS = [(1024, 0), (8192, 0), (32768, 0), (512, 16384)]
ROWS = (16, 64, 256, 2048)


def torch_kernels(suite, name="llama-3.1-8b"):
    torch = suite.torch()
    if suite.rehearse:
        raise Skipped("there is no GPU to time torch on")
    figures = suite.json["phases"]["torch-kernels"] = {"attention": {}, "products": {}}
    for backend in ["CUDNN_ATTENTION", "FLASH_ATTENTION"]:
        row(suite, f"{name} attention by {backend.lower()}", figures["attention"].setdefault(backend, {}), PROMPTS,
            lambda prompt: attention(torch, name, backend, *prompt), "TFLOP/s")
    row(suite, f"{name} products in e4m3 by _scaled_mm", figures["products"], ROWS, lambda rows: products(torch, name, rows), "us a layer")


def row(suite, what, figures, cases, measure, unit):
    """Figures of all cases in one row; of a case that fails, why."""
    words = []
    for case in cases:
        label = " after ".join(f"{part:,}" for part in case if part) if isinstance(case, tuple) else f"{case} rows"
        try:
            figures[label] = measure(case)
            words.append(f"{label}: {figures[label]:.0f}")
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            words.append(f"{label}: {str(error).splitlines()[0][:60]}")
    suite.row("torch-kernels", what, f"{', '.join(words)} {unit}", word=None if figures else "open")


def attention(torch, name, backend, tokens, context):
    """TFLOP/s of causal attention of one layer."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    _, shape = shapes.SHAPES[name]
    heads, kv_heads, width = shape["num_attention_heads"], shape["num_key_value_heads"], shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    q = torch.randn(1, heads, tokens, width, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, kv_heads, tokens + context, width, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    mask = {"is_causal": True} if context == 0 else {"attn_mask": causal_lower_right(tokens, tokens + context)}
    with sdpa_kernel([getattr(SDPBackend, backend)]):
        seconds = timed(torch, lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **mask))
    return 4 * heads * width * tokens * (context + (tokens + 1) / 2) / seconds / 1e12


def products(torch, name, rows):
    """Microseconds of a layer's four products with scales of whole tensors."""
    _, shape = shapes.SHAPES[name]
    hidden, inner, heads, kv_heads = (shape[key] for key in ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"])
    width = shape.get("head_dim") or hidden // heads
    one = torch.ones((), device="cuda")
    total = 0.0
    for n, k in [((heads + 2 * kv_heads) * width, hidden), (hidden, heads * width), (2 * inner, hidden), (hidden, inner)]:
        x = torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn)
        weight = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
        total += timed(torch, lambda: torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
    return total * 1e6
