"""Writes the section of docs/benchmarks.md that is made from the results of GPU runs: `report.py [--check]`. With --check it only tests that
the section is that of the files in tests/gpu/results."""

import json
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
RESULTS, DOCUMENT = REPOSITORY / "tests/gpu/results", REPOSITORY / "docs/benchmarks.md"
BEGIN, END = "<!-- begin: tests/gpu/report.py -->", "<!-- end: tests/gpu/report.py -->"


def section(results):
    """Markdown of all runs, by the name of their file, the newest first."""
    if not results:
        return "No results of `tests/gpu/slot` are kept in `tests/gpu/results` yet.\n"
    return "\n".join(of_run(name, results[name]) for name in sorted(results, reverse=True))


def of_run(name, run):
    ceilings = run.get("ceilings", {})
    failed = [f"{what}: {figure}" for _, what, figure, _, verdict in run["rows"] if verdict == "FAILED"]
    undone = [what for _, what, _, _, verdict in run["rows"] if verdict == "open"]
    lines = [f"#### {name}", "",
             f"Revision `{run['revision']}`, {ceilings.get('device', 'device unknown')}; it reads {ceilings.get('read_tb_s', float('nan')):.2f} TB/s, "
             f"of which shares are given. {sum(verdict == 'ok' and not goal for _, _, _, goal, verdict in run['rows'])} checks passed, {len(failed)} failed, {len(undone)} "
             "were not run.", ""]
    lines += [f"- failed: {what}" for what in failed] + [f"- not run: {what}" for what in undone] + [""] * bool(failed or undone)
    for model, ways in run["phases"].get("table", {}).items():
        lines += table(model, ways)
    figures = [(what, figure, verdict) for phase, what, figure, _, verdict in run["rows"]
               if phase in ("beside", "torch-kernels", "swap", "microbenchmarks") and verdict in ("", "ok", "MISSED")]
    if figures:
        lines += ["| measured | figure |", "|---|---|"]
        lines += [f"| {what} | {str(figure).replace('|', '/')}{' (missed its goal)' if verdict == 'MISSED' else ''} |"
                  for what, figure, verdict in figures] + [""]
    return "\n".join(lines)


def table(model, ways):
    """Milliseconds by way of computing."""
    columns = [(kind, key) for kind in ("decode", "prompts") for key in next(iter(ways.values()), {}).get(kind, {})]
    head = [f"batch {key}" if kind == "decode" else f"prompt {key}" for kind, key in columns]
    lines = [f"| {model}, ms | {' | '.join(head)} |", f"|---|{'---|' * len(columns)}"]
    for way, figures in ways.items():
        cells = [f"{figures[kind][key]:.2f}" if key in figures[kind] else "-" for kind, key in columns]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return [*lines, ""]


def replaced(document, text):
    """The document with another section."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{DOCUMENT} has no section between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


def main():
    results = {file.stem: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    document = DOCUMENT.read_text()
    written = replaced(document, section(results))
    if "--check" in sys.argv[1:]:
        sys.exit(None if written == document else f"{DOCUMENT} is not what tests/gpu/report.py makes of {RESULTS}; run it")
    DOCUMENT.write_text(written)


if __name__ == "__main__":
    main()
