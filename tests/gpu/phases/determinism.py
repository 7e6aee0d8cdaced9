"""One text, with the same bits in every batch and chunk; and streams with drafts beside streams without."""


def determinism(suite):
    path = suite.model("qwen3-0.6b")
    chunks = [1500, 7, 256] if suite.quick else [1500, 2048, 1, 7, 256, 1000]
    results = []
    for deterministic in [True, False]:
        task = {"determinism": {"length": 1500, "companions": [1, 2, 3, 8, 17, 64, 100], "chunks": chunks}}
        result = suite.job("determinism", path, task, 200, slots=128, batch_tokens=2048, context_tokens=2048,
                           deterministic=deterministic)
        detail = f"{result['ways']} ways, {result['rows']} rows, {len(result['different'])} differ"
        if deterministic:
            compared = result["rows"] > result["ways"] > len(chunks)
            suite.check("determinism", "bits over batch sizes and chunks", compared and not result["different"], detail)
        else:
            suite.row("determinism", "bits over batch sizes and chunks, fast mode (for comparison)", detail)
        results.append(result)
        suite.json["phases"]["determinism"] = results


def drafts(suite):
    """Drafts change no bit in the deterministic mode, also with a KV cache in 8 bits and on two GPUs; and what they gain."""
    limits = dict(slots=16, batch_tokens=1024, context_tokens=1024)
    task = {"streams": [1, 4, 16], "output": 100, "drafts_max": 8, "pairs": 1, "logprobs": True, "governed": False}
    figures = suite.json["phases"]["drafts"] = {}
    modes = {"": {}, " fp8_kv_cache": {"fp8_kv_cache": True}, " without graphs": {"graphs": False}}
    if suite.gpu_count() > 1:
        modes[" two GPUs"] = {"gpus": [0, 1]}
    path = suite.model("qwen3-0.6b")
    for label, mode in modes.items():
        try:
            result = figures[f"bits{label}"] = suite.job("drafts", path, {"drafts": task}, 200, deterministic=True, **limits, **mode)
        except RuntimeError as error:
            suite.check("drafts", f"bits with drafts and without{label}", False, str(error)[:300])
            continue
        different, accepted = sum(row["different"] for row in result), sum(row["accepted"] for row in result)
        suite.check("drafts", f"bits with drafts and without{label}", different == 0 and accepted > 0,
                    f"{accepted} drafts stood, {different} streams differ")
    for name in ["qwen3-0.6b"] if suite.quick else ["qwen3-0.6b", "llama-3.1-8b"]:
        task = {"streams": [1, 4, 16], "output": 200, "drafts_max": 8, "pairs": 3 if suite.quick else 6, "logprobs": False,
                "governed": True}
        try:
            result = figures[name] = suite.job("drafts", suite.model(name), {"drafts": task}, 300, **limits)
        except (RuntimeError, OSError) as error:
            suite.check("drafts", name, False, str(error)[:300])
            continue
        for row in result:
            copies = row["workload"] == "copying"
            goal = ("1.5 x" if row["streams"] == 1 else "") if copies else "0.97 x"
            suite.row("drafts", f"{name}, {row['streams']} streams, {'copied runs' if copies else 'no repetition'}",
                      f"{row['without']:.0f} / {row['with']:.0f} tok/s = {row['ratio']:.2f} ({row['ratio_min']:.2f} to "
                      f"{row['ratio_max']:.2f}), {row['tokens_per_step']:.2f} tokens a step", goal,
                      row["ratio"] >= float(goal[:-2]) if goal else None)
