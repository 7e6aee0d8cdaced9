"""Times of decode steps and prefill, against floors and ceilings."""

import shapes
from phases.ceilings import FLOORS, floors, measured_ceilings
from recorder import Skipped


def steps(suite, names=None):
    step_times(suite, names or (["qwen3-0.6b"] if suite.quick else list(FLOORS)))


def deterministic_steps(suite):
    step_times(suite, ["qwen3-0.6b"] if suite.quick else ["qwen3-0.6b", "llama-3.1-8b"], "deterministic")


def fp8_steps(suite):
    step_times(suite, ["qwen3-0.6b"] if suite.quick else ["qwen3-0.6b", "llama-3.1-8b"], "fp8_kv_cache")


def serial_steps(suite):
    step_times(suite, ["qwen3-0.6b"] if suite.quick else ["qwen3-0.6b", "qwen3-1.7b"], "serial")


def step_modes(suite, name="llama-3.1-8b"):
    """What kernels that overlap and products chosen by time gain, each alone and both; last, what graphs and copies beside the
    kernels gain."""
    cases = [dict(sequences=b, context=1024, tokens=1) for b in (1, 8, 64, 256)]
    cases += [dict(sequences=1, context=0, tokens=tokens) for tokens in (64, 512, 1024, 8192)]
    figures = suite.json["phases"].setdefault("step-modes", {})
    modes = [{}, {"overlap": False}, {"autotune": False}, {"overlap": False, "autotune": False}, {"copy_streams": False},
             {"graphs": False}]
    for off in modes:
        label = f"{name}, {', '.join(f'no {option}' for option in off) or 'all on'}"
        try:
            result = suite.job("step-modes", suite.model(name), {"steps": {"cases": cases, "repeats": 30, "seconds": 1.5}}, 120,
                               slots=256, batch_tokens=8192, context_tokens=8192, **off)
        except (RuntimeError, OSError) as error:
            suite.check("step-modes", label, False, str(error)[:300])
            continue
        figures[label] = {"load_seconds": suite.recorder.loaded["load_seconds"], "cases": result,
                          "products": [] if off else suite.recorder.loaded["products"]}
        took = {tuple(row["case"]): row["device_ms"] for row in result if "device_ms" in row}
        decode = [f"{batch}: {took[batch, 1024, 1]:.2f}" for batch in (1, 8, 64, 256) if (batch, 1024, 1) in took]
        prefill = [f"{tokens:,}: {took[1, 0, tokens]:.1f}" for tokens in (64, 512, 1024, 8192) if (1, 0, tokens) in took]
        walls = [f"{row['case'][0]}: {row['wall_ms']:.2f}" for row in result if row["case"][1:] == [1024, 1] and "wall_ms" in row]
        suite.row("step-modes", label, f"ms of decode by batch {', '.join(decode)} (wall {', '.join(walls)}); "
                  f"of prefill {', '.join(prefill)}")


def step_times(suite, names, option=None):
    """Steps of some models; with an option that has its price, goals are not judged."""
    ceilings = {"read_tb_s": 1.0, "matmul_tflops": 1.0} if suite.rehearse else measured_ceilings(suite)
    phase = {"deterministic": "deterministic-steps", "fp8_kv_cache": "fp8-steps", "serial": "serial-steps", None: "steps"}[option]
    mode = f" {option}" if option else ""
    cases = [dict(sequences=b, context=1024, tokens=1) for b in (1, 8, 64, 256)]
    cases += [dict(sequences=1, context=0, tokens=1024), dict(sequences=8, context=0, tokens=1024)]
    if option != "deterministic":
        # By differences: what more keys cost is attention alone.
        cases += [dict(sequences=64, context=4096, tokens=1), dict(sequences=1, context=0, tokens=8192),
                  dict(sequences=1, context=16384, tokens=8192)]
    for name in names:
        if suite.recorder.left() < 60:
            suite.recorder.skip(phase, f"{name}: no time left")
            continue
        try:
            result = suite.job(phase, suite.model(name), {"steps": {"cases": cases, "repeats": 30, "seconds": 3.0}}, 300, slots=256,
                               batch_tokens=8192, context_tokens=32768,
                               **({"overlap": False} if option == "serial" else {option: True} if option else {}))
        except Skipped as why:
            suite.recorder.skip(phase, f"{name}: {why}")
            continue
        except (RuntimeError, OSError) as error:
            suite.check(phase, name, False, str(error)[:300])
            continue
        floor_of = floors(suite, name)
        suite.json["phases"].setdefault("steps", {})[f"{name}{mode}"] = result
        if option is None:
            products(suite, name)
        by = {tuple(r["case"]): r.get("device_ms") for r in result}
        if option is None and name == names[min(1, len(names) - 1)]:
            untimed_steps(suite, name, cases[:4], by)
        for batch in (1, 8, 64, 256):
            took, floor = by.get((batch, 1024, 1)), floor_of[batch]
            if took:
                goal = 1.54 if batch == 256 else 2.0 if name == "qwen3-0.6b" and batch <= 8 else 1.33
                wall = next(r["wall_ms"] for r in result if tuple(r["case"]) == (batch, 1024, 1))
                suite.row(phase, f"{name}{mode} decode, batch {batch}",
                          f"{took:.2f} ms, {took / floor:.2f} x floor, {batch / took * 1e3:.0f} tok/s (wall {wall:.2f} ms)",
                          "" if option else f"{goal} x", None if option else took <= goal * floor)
            else:
                suite.row(phase, f"{name}{mode} decode, batch {batch}", "not measured: it does not fit", word="open")
        took = by.get((1, 0, 1024))
        if took:
            suite.row(phase, f"{name}{mode} prefill of 1,024", f"{took:.2f} ms, "
                      f"{took / floor_of['prefill']:.2f} x floor")
        more_keys, keys = by.get((64, 4096, 1)), by.get((64, 1024, 1))
        if more_keys and keys and more_keys > keys:
            bytes_each = shapes.kv_bytes_per_token(name, option == "fp8_kv_cache")
            rate = 64 * (4096 - 1024) * bytes_each / (more_keys - keys) / 1e9
            share = rate / ceilings["read_tb_s"]
            suite.row(phase, f"{name}{mode} paged decode attention",
                      f"{rate:.2f} TB/s, {100 * share:.0f} % of reading",
                      "" if option else "80 %", None if option else share >= 0.8)
        late, early = by.get((1, 16384, 8192)), by.get((1, 0, 8192))
        if late and early and late > early:
            rate = shapes.attention_flops(name, 8192, 16384) / (late - early) / 1e9
            suite.row(phase, f"{name}{mode} prefill attention", f"{rate:.0f} TFLOP/s",
                      "" if option else "300", None if option else rate >= 300)


def untimed_steps(suite, name, cases, timed):
    """What choosing products by time gains whole steps."""
    try:
        result = suite.job("steps", suite.model(name), {"steps": {"cases": cases, "repeats": 30, "seconds": 3.0}}, 200, slots=256,
                           batch_tokens=8192, context_tokens=32768, autotune=False)
    except Skipped as why:  # What was measured of the model before is still to be shown.
        suite.recorder.skip("steps", f"{name} without timed products: {why}")
        return
    except RuntimeError as error:
        suite.check("steps", f"{name} without timed products", False, str(error)[:300])
        return
    suite.json["phases"].setdefault("steps", {})[f"{name} no autotune"] = result
    pairs = [(row["case"][0], row["device_ms"], timed.get(tuple(row["case"]))) for row in result if "device_ms" in row]
    suite.row("steps", f"{name} decode by cuBLASLt's first algorithms",
              ", ".join(f"batch {b}: {first:.2f} ms ({100 * (first / chosen - 1):+.1f} %)" for b, first, chosen in pairs if chosen))


def products(suite, name):
    """The library's first algorithms against those that the last job's load chose, by rows; the head is one of them."""
    tuned = suite.recorder.loaded["products"]
    suite.json["phases"].setdefault("products", {})[name] = {"seconds": suite.recorder.loaded["load_seconds"], "tuned": tuned}
    if not tuned:
        suite.row("steps", f"{name} products", "none was timed", word="open")
    for rows in sorted({entry["shape"][0] for entry in tuned}):
        here = [entry for entry in tuned if entry["shape"][0] == rows and entry["first_us"] is not None]
        if not here:
            continue
        first, chosen = sum(entry["first_us"] for entry in here), sum(entry["us"] for entry in here)
        replaced = [f"{n}x{k} {entry['by'] if entry['own'] else entry['way']}" for entry in here if entry["way"]
                    for _, n, k in [entry["shape"]]]
        work = 2e-6 * sum(m * n * k for m, n, k in (entry["shape"] for entry in here))
        suite.row("steps", f"{name} products of {rows} rows, one of each of {len(here)}",
                  f"first {first:.1f} us, chosen {chosen:.1f} us, {100 * (first / chosen - 1):+.1f} %, {work / chosen:.1f} TFLOP/s"
                  + (f"; replaced: {', '.join(replaced)}" if replaced else ""))
