"""The page: charts by operation under filters, with style and script inside."""

import base64
import hashlib
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from ejkernel.cli.report import charts
from ejkernel.cli.report.rows import Result, Row

FOLDER = Path(__file__).parent
OTHER = "other"
_SHOW = {"": "all values", "missed": "missed targets", "slower": "slower than a peer"}


def page(results: list[Result]) -> str:
    """The page as HTML."""
    rows = [row for result in results for row in result.rows]
    style, script = ((FOLDER / name).read_text("utf-8") for name in ("page.css", "page.js"))
    filled = {
        "policy": f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
        "style": style,
        "script": script,
        "summary": _summary(rows),
        "filters": _filters(rows),
        "sections": "\n".join(_sections(results)),
    }
    template = (FOLDER / "page.html").read_text("utf-8")
    # In one pass: what is filled in is not searched for marks again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], template)


def _hash(text: str) -> str:
    """How the policy names the one style and the one script that may be used."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def operation(row: Row) -> str:
    return row.operation or OTHER


def _summary(rows: list[Row]) -> str:
    """How many targets are missed, and how many calls are slower than a peer."""
    judged = [row for row in rows if row.met is not None]
    compared = [row for row in rows if row.ratio is not None]
    missed = sum(not row.met for row in judged)
    slower = sum(charts.slower(row) for row in compared)
    lines = [f"Figures and calls: {len(rows)}."]
    if judged:
        link = f' (<a href="#show=missed">{missed} missed</a>)' if missed else ""
        lines.append(f"Targets met: {len(judged) - missed} of {len(judged)}{link}.")
    if compared:
        link = f'<a href="#show=slower">{slower}</a>' if slower else "0"
        lines.append(f"Slower than the best peer: {link} of {len(compared)} calls.")
    return " ".join(lines)


def _filters(rows: list[Row]) -> str:
    """One selection for each property that rows differ in, and one for what needs attention."""
    choices: dict[str, Iterable[str]] = {
        "operation": {operation(row) for row in rows},
        "dtype": {row.dtype or charts.UNSPECIFIED for row in rows},
        "mask": {word for row in rows for word in charts.masks(row)},
    }
    fields = [
        _select(name, {"": "all", **{value: value for value in _ordered(values)}})
        for name, values in choices.items()
    ]
    return "".join([*fields, _select("show", _SHOW)])


def _ordered(values: Iterable[str]) -> list[str]:
    """By name; what was not recorded comes last."""
    return sorted(values, key=lambda value: (value in (charts.UNSPECIFIED, OTHER), value))


def _select(name: str, options: dict[str, str]) -> str:
    body = "".join(
        f'<option value="{escape(value)}">{escape(text)}</option>'
        for value, text in options.items()
    )
    return f'<label>{name} <select name="{name}">{body}</select></label>'


def _sections(results: list[Result]) -> Iterable[str]:
    """One for each operation."""
    names = {operation(row) for result in results for row in result.rows}
    for name in _ordered(names):
        groups = [
            (title, result.source, rows)
            for result in results
            for title, rows in _groups([x for x in result.rows if operation(x) == name])
        ]
        groups.sort(key=lambda group: not group[2][0].rate)  # rates first
        body = "\n".join(charts.chart(*group) for group in groups)
        yield (
            f'<section data-operation="{escape(name)}"><h2>{escape(name)}</h2>\n{body}\n</section>'
        )


def _groups(rows: list[Row]) -> Iterable[tuple[str, list[Row]]]:
    """Rates of one unit share a scale, and so a chart; all other rows are one chart."""
    units = dict.fromkeys(row.unit for row in rows if row.rate)
    for unit in units:
        found = [row for row in rows if row.rate and row.unit == unit]
        peers = " of ours and of peers" if any(row.peer for row in found) else ""
        yield f"{unit}{peers}", found
    rest = [row for row in rows if not row.rate]
    if rest:
        compared = any(row.peer for row in rest)
        yield ("Compared with plain JAX" if compared else "Figures"), rest
