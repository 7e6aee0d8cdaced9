"""What this very card can do at best, and what follows for a step."""

# Milliseconds of a decode step at a context of 1,024 tokens, and of a prefill of 1,024, that memory and arithmetic of
# one H200 allow (bf16; 4.3 TB/s and 790 TFLOP/s measured). Small ones first: what they find holds for the others.
FLOORS = {
    "qwen3-0.6b": {1: 0.30, 8: 0.50, 64: 2.03, 256: 7.38, "prefill": 1.29},
    "llama-3.1-8b": {1: 3.52, 8: 3.74, 64: 5.49, 256: 12.9, "prefill": 18.4},
    "qwen3-1.7b": {1: 0.83, 8: 1.02, 64: 2.55, 256: 8.11, "prefill": 3.81},
    "qwen3-8b": {1: 3.56, 8: 3.80, 64: 5.77, 256: 13.9, "prefill": 18.4},
}
FLOORS_OF, FLOORS_TB_S, FLOORS_TFLOPS = "H200", 4.3, 790.0


def yardstick(suite):
    """The one bandwidth that shares are given of: what this card reads at best."""
    if suite.rehearse:
        suite.torch()
        raise RuntimeError("there is no GPU to measure")
    measured_ceilings(suite)


def measured_ceilings(suite):
    if suite.ceilings is None:
        suite.ceilings = suite.json["ceilings"] = measure_ceilings(suite.torch())
        suite.row("ceilings", "reading", f"{suite.ceilings['read_tb_s']:.2f} TB/s, a copy moves {suite.ceilings['copy_tb_s']:.2f}")
        suite.row("ceilings", "bf16 product 8192^3", f"{suite.ceilings['matmul_tflops']:.0f} TFLOP/s")
        if FLOORS_OF not in suite.ceilings["device"]:
            suite.row("ceilings", "floors", f"those of one {FLOORS_OF}, by how much slower {suite.ceilings['device']} reads and multiplies")
    return suite.ceilings


def floors(suite, name):
    """Those of this card: of another than they were computed for, as much longer as it reads and multiplies slower."""
    if suite.rehearse or FLOORS_OF in measured_ceilings(suite)["device"]:
        return FLOORS[name]
    ceilings = measured_ceilings(suite)
    slower, arithmetic = FLOORS_TB_S / ceilings["read_tb_s"], FLOORS_TFLOPS / ceilings["matmul_tflops"]
    return {case: floor * (arithmetic if case == "prefill" else slower) for case, floor in FLOORS[name].items()}


def timed(torch, work, repeats=10):
    """Seconds of one of several runs on the GPU, after some that are not counted."""
    for _ in range(3):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(repeats):
        work()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / repeats / 1e3


def measure_ceilings(torch):
    """Bandwidth (of reductions over 4 GiB, the fastest of which reads at most what the memory gives; and of a copy, bytes read plus
    written) and bf16 product rate of this very card."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    words = source.view(torch.float32).nan_to_num_(0.0, 0.0, 0.0)
    reductions = [lambda: words.sum(), lambda: words.amax(), lambda: source.view(torch.int64).amax()]
    read = max(source.numel() / timed(torch, reduction) for reduction in reductions) / 1e12
    half = source[: 2 << 30]
    target = torch.empty_like(half)
    copy = 2 * half.numel() / timed(torch, lambda: target.copy_(half)) / 1e12
    del source, words, half, target
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = 2 * 8192**3 / timed(torch, lambda: a @ b) / 1e12
    del a, b
    torch.cuda.empty_cache()
    return {"read_tb_s": read, "copy_tb_s": copy, "matmul_tflops": product, "device": torch.cuda.get_device_name()}
