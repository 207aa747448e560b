"""Recorded results: where they are, and where each of them comes from."""

import functools
import json
from pathlib import Path
from typing import Any

from benchmarks.report import describe
from ejkernel.cli import bench
from ejkernel.cli.report import rows
from ejkernel.cli.report.results import parse

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@functools.cache
def load(name: str) -> dict[str, Any] | None:
    """The result of this name, such as "h200/flash_attention"; None where there is none."""
    if not path(name).exists():
        return None
    return describe.described(name, json.loads(path(name).read_text()))


def path(name: str) -> Path:
    """The file of a result."""
    return RESULTS / f"{name}.json"


@functools.cache
def rows_of(name: str) -> tuple[rows.Row, ...]:
    """The figures and calls of a result; none where it was not recorded."""
    data = load(name)
    return parse(data, name, {x.name: x for x in bench.FIGURES}).rows if data else ()


def names(folder: str = "") -> list[str]:
    """The names of all results directly in a folder."""
    found = sorted((RESULTS / folder).glob("*.json"))
    return [str(path.relative_to(RESULTS).with_suffix("")) for path in found]


def source(result: dict[str, Any]) -> str:
    """Device, versions, date and commit in one line; what was not recorded is said."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    date = (result.get("date") or "date not recorded").partition("T")[0]
    commit = result.get("commit")
    return (
        f"{result.get('device', 'device not recorded')}; {versions}; {date}; "
        f"{f'commit `{commit}`' if commit else 'commit not recorded'}."
    )


def table(header: list[str], rows: list[list[str]], numbers: int = 0) -> str:
    """A table in Markdown; the last `numbers` columns are aligned to the right."""
    texts = len(header) - numbers
    lines = [header, ["---"] * texts + ["---:"] * numbers, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
