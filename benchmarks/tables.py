"""Writes the tables of README.md: operations from their docstrings, figures from the results.

python benchmarks/tables.py           write
python benchmarks/tables.py --check   only say whether README.md is up to date
"""

import json
import re
import sys
from pathlib import Path

import ejkernel.modules
from ejkernel.kernels import OPS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = ROOT / "benchmarks/results/h200/ragged_page_attention_v3.json"


def amount(value: float | None, unit: str) -> str:
    """A figure as a reader wants it: three digits and its unit."""
    if value is None:
        return "not measured"
    digits = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return f"{digits} {unit}" if unit != "x" else f"{digits} times"


def table(result: dict) -> str:
    """One device: a line that says where the figures come from, and a row for each of them."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    rows = [
        f"{result['device']}; {versions}; commit {result['commit'] or 'unknown'}.",
        "",
        "| what | measured | asked for |",
        "|---|---|---|",
    ]
    for figure in result["figures"]:
        limit = "at most" if figure["better"] == "lower" else "at least"
        measured = amount(figure["value"], figure["unit"])
        asked = f"{limit} {amount(figure['bound'], figure['unit'])}"
        rows.append(f"| {figure['what']} | {measured} | {asked} |")
    return "\n".join(rows)


def figures() -> str:
    """The tables of all devices that were measured."""
    paths = sorted(ROOT.glob("benchmarks/results/*.json"))
    return "\n\n".join(table(json.loads(path.read_text())) for path in paths) or "Not measured yet."


def gpu() -> str:
    """What was measured on an H200: the best of ours beside the best of the others."""
    rows = ["| call | ours | best peer | ours / best peer |", "|---|---|---|---|"]
    versions: dict[str, str] = {}
    for path in sorted(ROOT.glob("benchmarks/results/h200/*.json")):
        result = json.loads(path.read_text())
        if "cases" not in result:  # the tests that ran there
            continue
        versions |= result["versions"]
        if path == PAGES:
            continue
        for case, found in result["cases"].items():
            rates = {name: one["tflops"] for name, one in found.items() if "tflops" in one}
            ours = {name: rate for name, rate in rates.items() if name.startswith("ours ")}
            peers = {name: rate for name, rate in rates.items() if name not in ours}
            if not (ours and peers):
                continue
            mine, other = max(ours, key=rates.__getitem__), max(peers, key=rates.__getitem__)
            rows.append(
                f"| `{path.stem}`, {case.replace('_', ' ')} | {rates[mine]:.0f} TFLOP/s "
                f"({mine.removeprefix('ours ')}) | {rates[other]:.0f} ({other}) "
                f"| {rates[mine] / rates[other]:.2f} |"
            )
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join([f"NVIDIA H200, bfloat16; {said}.", "", *rows, "", *pages()])


def pages() -> list[str]:
    """Attention over pages on an H200, which has no peer there that serves these calls."""
    if not PAGES.exists():
        return []
    result = json.loads(PAGES.read_text())
    rows = ["| `ragged_page_attention_v3` | measured | asked for |", "|---|---|---|"]
    for case, found in result["cases"].items():
        unit = next((unit for unit in ("TB/s", "us", "TFLOP/s") if unit in found), None)
        if unit is None:
            continue
        limit = "at most" if unit == "us" else "at least"
        asked = f"{limit} {amount(found['bar'], unit)}" if "bar" in found else ""
        rows.append(f"| {case.replace('_', ' ')} | {amount(found[unit], unit)} | {asked} |")
    for what, ratio in result["summary"].items():
        name, _, asked = what.rstrip(")").partition(" (")
        rows.append(f"| {name.replace('_', ' ')} | {ratio:.2f} | {asked} |")
    return rows


def operations() -> str:
    """Every operation: a link to its page and the first line of its docstring."""
    rows = ["| operation | what it does |", "|---|---|"]
    for name in OPS:
        said = (getattr(ejkernel.modules, name).__doc__ or "").strip().splitlines()[0]
        rows.append(f"| [`{name}`](docs/{name}.md) | {said} |")
    return "\n".join(rows)


def render(text: str) -> str:
    """`text` with each table between its marks."""
    for name, write in (("operations", operations), ("figures", figures), ("gpu", gpu)):
        marked = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = marked.sub(lambda found, write=write: f"{found[1]}{write()}\n{found[2]}", text)
    return text


def main(arguments: list[str]) -> int:
    text = README.read_text()
    wanted = render(text)
    if arguments == ["--check"]:
        return int(text != wanted)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
