"""The kernels' own tests on the GPU, and how long each kernel takes."""

import json

from phases.ceilings import measured_ceilings

# Environment variable with GB/s that this card reads, of which the kernels' timings are given as shares.
BANDWIDTH = "INFLIGHT_TEST_BANDWIDTH_GB_S"
# What is run of the kernels' tests: those over buffers, not the ones of single functions.
FAMILIES = ["attention", "delta", "drafts", "non_finite", "overlap", "product", "rows", "sampling", "sampling_split"]
# A property that fails is made small, but not for longer than this; what it then says is enough.
TEST_ENVIRONMENT = {"INFLIGHT_TEST_GPU": "1", "PROPTEST_MAX_SHRINK_TIME": "15000", "RUST_BACKTRACE": "0"}
# Microbenchmarks by what they are called in the results; what says most first.
TIMINGS = {"decode attention": "timing::attention::decode", "prefill attention": "timing::attention::prefill",
           "rows": "timing::rows::", "sampling": "timing::sampling::", "products of few rows": "timing::products::"}


def check_filters(suite, phase, filters):
    """Fails for each filter that selects none of the kernel tests: the program would run nothing and exit with 0."""
    code, output, _ = suite.recorder.command("kernel-tests", [str(suite.bundle / "kernel-tests"), "--list"], 30)
    known = [line.removesuffix(": test") for line in output.splitlines() if line.endswith(": test")]
    unknown = unmatched(filters, known)
    if code != 0 or unknown:
        suite.check(phase, "every filter selects a test", False, f"none for {', '.join(unknown)}" if code == 0 else outcome(output))


def kernels(suite, families=None):
    """All families of tests, or some."""
    families = FAMILIES if families is None else families
    if not families:
        suite.row("kernels", "no family failed before", "none is run")
        return
    check_filters(suite, "kernels", [f"{family}::" for family in families])
    figures = suite.json["phases"].setdefault("kernels", {})
    # Each family in a process of its own: after one fault on a GPU, nothing else works in that process.
    for family in families:
        command = [str(suite.bundle / "kernel-tests"), "--test-threads=4", "--nocapture", "--skip", "timing::", f"{family}::"]
        # One that is cut off has not passed.
        figures[family] = {"passed": False}
        code, output, seconds = suite.recorder.command(f"kernels-{family}", command, limit(suite, 240), TEST_ENVIRONMENT)
        figures[family] = {"passed": code == 0, "seconds": round(seconds, 1), "failures": [] if code == 0 else failures(output)}
        detail = f"{outcome(output)} in {seconds:.0f} s"
        if code != 0:
            detail = "; ".join([detail, *figures[family]["failures"][:1]])
        suite.check("kernels", f"{family} against references in f64", code == 0, detail)
        for line in figures[family]["failures"]:
            print(f"    {line}", flush=True)


def limit(suite, seconds):
    """Seconds for one of several programs: one that hangs leaves the others half of the phase's time."""
    return min(seconds, max(15, suite.recorder.left() / 2))


def microbenchmarks(suite):
    """How long each kernel takes, as a share of what the card can do."""
    check_filters(suite, "microbenchmarks", TIMINGS.values())
    environment = TEST_ENVIRONMENT if suite.rehearse else {**TEST_ENVIRONMENT, BANDWIDTH: f"{measured_ceilings(suite)['read_tb_s'] * 1e3:.1f}"}
    for name, tests in TIMINGS.items():
        command = [str(suite.bundle / "kernel-tests"), "--ignored", "--test-threads=1", "--nocapture", tests]
        code, output, _ = suite.recorder.command(f"timing-{name.replace(' ', '-')}", command, limit(suite, 120), environment)
        rows = list(rows_of(output))
        suite.json["phases"].setdefault("microbenchmarks", {})[name] = rows
        measured = [row for row in rows if "us" in row]
        detail = f"{len(measured)} figures"
        if code != 0:
            detail = "; ".join([detail, *(failures(output)[:1] or [outcome(output)[-100:]])])
        suite.check("microbenchmarks", f"{name}: measured", code == 0 and bool(measured), detail)
        for what, figure, goal, good in summary(measured):
            suite.row("microbenchmarks", what, figure, goal, good)


def summary(rows):
    """The figures that are worth a line of the table: (what, figure, goal, whether it is met)."""
    attention = {}
    for row in rows:
        kernel = row.get("kernel")
        if kernel == "attention_decode":
            attention.setdefault((row["model"], row["fp8"], row["pool_gb"], row["sequences"], row["context"] + 1), {})[row["blocks"]] = row
        elif kernel == "attention_prefill":
            yield (f"{row['model']} prefill of {row['tokens']:,} after {row['context']:,}", f"{row['tflops']:.0f} TFLOP/s", "300",
                   row["tflops"] >= 300)
        elif kernel == "skinny_gemm" and row["overlap"]:
            yield (f"{row['m']} x {row['k']} by {row['n']}, overlapping",
                   f"{row['us']:.1f} us, {row['gb_s']} GB/s, {100 * row['share_of_reading']:.0f} % of reading "
                   f"(deterministic product: {row['deterministic_us']:.1f} us)", "", None)
        elif kernel == "sample":
            yield (f"sampling, {row['way']}, {row['rows']} rows{' in parts' if row['parts'] else ''}", f"{row['us']:.1f} us, {100 * row['share_of_reading']:.0f} % of reading", "", None)
        elif kernel in ("norm", "swiglu", "finish_qkv", "finish_qkv_fp8"):
            yield (f"{row['model']} {kernel}, {row['rows']} rows", f"{row['us']:.2f} us, {100 * row['share_of_reading']:.0f} % of reading", "", None)
    for (model, fp8, pool, sequences, context), orders in attention.items():
        shares = ", ".join(f"{order} {row['us']:.1f} us, {100 * row['share_of_reading']:.0f} % of reading" for order, row in orders.items())
        least = min(row["share_of_reading"] for row in orders.values())
        yield (f"{model}{' fp8' if fp8 else ''} decode of {sequences} x {context:,}, pool of {pool} GB", shares,
               "80 %" if sequences >= 64 else "", least >= 0.8 if sequences >= 64 else None)


def failed_families(results):
    """Families that failed or were cut off in the results of an earlier run; None if it ran none."""
    families = results.get("phases", {}).get("kernels", {})
    # Those that no time was left for have not passed.
    return [family for family in FAMILIES if not families.get(family, {}).get("passed")] if families else None


def rows_of(output):
    """The lines of JSON that a test prints; the first one may come behind its name."""
    for line in output.splitlines():
        try:
            yield json.loads(line[line.index('{"'):])
        except ValueError:
            continue


def unmatched(filters, tests):
    """Filters that select none of the tests, which the test program selects by a part of their names. Timings are no tests."""
    def selects(filter, test):
        return filter in test and filter.startswith("timing::") == test.startswith("timing::")
    return [filter for filter in filters if not any(selects(filter, test) for test in tests)]


def outcome(output):
    """What a test program says at its end."""
    results = [line for line in output.splitlines() if line.startswith("test result")]
    return results[-1][13:60] if results else output.strip()[-300:]


def failures(output):
    """Names of failed tests, and what they say first; the message of a panic is in the line after it."""
    lines = output.splitlines()
    return [" ".join(lines[at:at + 2] if "panicked at" in line else [line])[:300] for at, line in enumerate(lines)
            if line.endswith("FAILED") or "panicked at" in line or "Test failed" in line][:20]
