"""Charts as HTML: a row of bars for each call, and the same values as a table."""

import re
from collections.abc import Iterable, Iterator
from html import escape

from ejkernel.cli.report.limits import IN_WORDS
from ejkernel.cli.report.rows import Bar, Row, Source, amount, target

UNSPECIFIED = "unspecified"
NO_MASK = "none"
_TICKS = 4
_HEADER = (
    "call",
    "pass",
    "dtype",
    "mask",
    "by",
    "value",
    "time",
    "target",
    "result",
    "of best peer",
    "of limit",
)


def words(text: str) -> str:
    """Text as HTML; what stands in backticks is code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def masks(row: Row) -> tuple[str, ...]:
    """The mask of a call in words, for the filter."""
    return (UNSPECIFIED,) if row.mask is None else row.mask or (NO_MASK,)


def slower(row: Row) -> bool:
    return row.ratio is not None and row.ratio < 1


def facets(row: Row) -> str:
    """What the filters look at, as attributes."""
    shown = {
        "dtype": row.dtype or UNSPECIFIED,
        # Separated by line breaks, which no word needs.
        "mask": "\n".join(x.replace("\n", " ") for x in masks(row)),
        "state": " ".join(
            name for name, holds in (("missed", row.met is False), ("slower", slower(row))) if holds
        ),
    }
    return " ".join(f'data-{name}="{escape(text)}"' for name, text in shown.items())


def chart(title: str, source: Source, rows: list[Row]) -> str:
    """One chart: what it shows, where the values come from, its bars, its table."""
    rates = all(row.rate for row in rows)
    most = max((_most(row) for row in rows), default=0.0)
    body = [_row(row, most if rates else _most(row)) for row in rows]
    if rates:
        body.append(_axis(most, rows[0].limit, rows[0].unit))
    return "\n".join(
        [
            '<article class="chart">',
            f"<h3>{words(title)}</h3>",
            f'<p class="source">{provenance(source)}</p>',
            _legend(rows),
            *body,
            _table(title, rows),
            "</article>",
        ]
    )


def provenance(source: Source) -> str:
    """Device, versions, date, commit and file; what was not recorded is said."""
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    date = (source.date or "").partition("T")[0]
    commit = f"commit <code>{escape(source.commit)}</code>" if source.commit else ""
    parts = [
        f"<b>{escape(source.device or 'device not recorded')}</b>",
        escape(versions or "versions not recorded"),
        escape(date or "date not recorded"),
        commit or "commit not recorded",
        *([f"file <code>{escape(source.file)}</code>"] if source.file else []),
        *([escape(source.note)] if source.note else []),
    ]
    return "; ".join(parts)


def _legend(rows: list[Row]) -> str:
    """What the colours and lines of this chart mean."""
    bars = [bar for row in rows for bar in row.bars]
    several = any(row.rate and len([x for x in row.bars if x.ours]) > 1 for row in rows)
    shown = [("key-ours", "ours, the default" if several else "ours", True)]
    shown += [("key-other", "ours, another platform", several)]
    shown += [("key-peer", "peer", any(not bar.ours for bar in bars))]
    shown += [("key-target", "target", any(row.bound is not None for row in rows))]
    limit = next((row for row in rows if row.limit is not None), None)
    if limit is not None:
        said = f"{_limit_in_words(limit)}: {amount(limit.limit, limit.unit)}"
        shown += [("key-limit", said, True)]
    if all(row.rate for row in rows):
        shown += [("key-none", "longer is better", True)]
    keys = "".join(
        f'<li class="{name}">{escape(text)}</li>' for name, text, present in shown if present
    )
    return f'<ul class="legend">{keys}</ul>'


def _most(row: Row) -> float:
    """The end of the scale of a row."""
    values = [bar.value for bar in row.bars if bar.value is not None]
    known = [x for x in (*values, row.bound, row.limit) if x is not None]
    return max(known, default=0.0)


def _percent(value: float, most: float) -> str:
    share = value / most if most > 0 else 0.0
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


def _row(row: Row, most: float) -> str:
    said = [f'<span class="pass">{words(row.direction)}</span> '] if row.direction else []
    said += [words(row.what), *_badges(row)]
    bars = "".join(_bar(row, bar, most) for bar in row.bars)
    return f'<div class="row" {facets(row)}><p class="what">{"".join(said)}</p>{bars}</div>'


def _badges(row: Row) -> Iterator[str]:
    """The target and whether it is met, and the ratio to the best peer."""
    if row.bound is not None:
        state = "met" if row.met else "missed"
        text = f"{state}: {target(row.bound, row.better, row.unit)}"
        yield f' <span class="badge {state}">{escape(text)}</span>'
    if row.ratio is not None and row.peer is not None:
        state = "slower" if slower(row) else "faster"
        text = f"{row.ratio:.2f}x {row.peer.name}"
        yield f' <span class="badge {state}">{escape(text)}</span>'


def _bar(row: Row, bar: Bar, most: float) -> str:
    name = bar.name.removeprefix("ours ")
    value = bar.problem or amount(bar.value, row.unit)
    kind = "peer" if not bar.ours else "ours" if bar == row.ours or not row.rate else "other"
    marks = '<rect class="base" width="100%" height="14" rx="2"/>'
    if bar.value is not None:
        width = _percent(bar.value, most)
        marks += f'<rect class="{kind}" width="{width}" height="14" rx="2"/>'
    if row.limit is not None:
        marks += _mark("limit", _percent(row.limit, most))
    if row.bound is not None and bar.ours:
        marks += _mark("target", _percent(row.bound, most))
    tip = escape("\n".join(_details(row, bar, value)))
    shown = f'<span class="value">{escape(value)}</span>'
    return (
        f'<div class="bar" data-tip="{tip}"><span class="name">{escape(name)}</span>'
        f'<svg class="track" height="14" aria-hidden="true">{marks}</svg>{shown}</div>'
    )


def _mark(kind: str, x: str) -> str:
    return f'<line class="{kind}" x1="{x}" x2="{x}" y1="-3" y2="17"/>'


def _details(row: Row, bar: Bar, value: str) -> Iterator[str]:
    """What is shown over a bar."""
    yield f"{bar.name}: {value}"
    if row.bound is not None and bar.ours:
        yield f"target: {target(row.bound, row.better, row.unit)}"
    if share := of_limit(row, bar):
        yield f"{share} of the {_limit_in_words(row)}"
    if (ratio := of_peer(row, bar)) and row.peer is not None:
        yield f"{ratio} of {row.peer.name}, the best timed peer"
    for name, number in bar.numbers.items():
        yield f"{name}: {number:.4g}"


def _limit_in_words(row: Row) -> str:
    return IN_WORDS.get(row.unit, "hardware limit")


def of_limit(row: Row, bar: Bar) -> str:
    return f"{bar.value / row.limit:.0%}" if bar.value is not None and row.limit else ""


def of_peer(row: Row, bar: Bar) -> str:
    """How much better than the best peer a value of ours is."""
    if not bar.ours or bar.value is None or row.peer is None or row.peer.value is None:
        return ""
    over, under = bar.value, row.peer.value
    if row.better == "lower":
        over, under = under, over
    return f"{over / under:.2f}x" if under else ""


def _axis(most: float, limit: float | None, unit: str) -> str:
    """The scale that all rows of a chart share."""
    step = _step(most / _TICKS)
    ticks = []
    for i in range(_TICKS * 3):
        value = i * step
        if value > most or (limit and abs(value - limit) < step / 2):
            break
        anchor = ' class="start"' if i == 0 else ""
        ticks.append(f'<text x="{_percent(value, most)}" y="12"{anchor}>{value:g}</text>')
    if limit:
        anchor = "limit end" if limit > 0.95 * most else "limit"
        ticks.append(f'<text x="{_percent(limit, most)}" y="12" class="{anchor}">{limit:g}</text>')
    svg = f'<svg class="track" height="16" aria-hidden="true">{"".join(ticks)}</svg>'
    unit = f'<span class="value">{escape(unit)}</span>'
    return f'<div class="bar axis"><span class="name"></span>{svg}{unit}</div>'


def _step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least as much."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** int(f"{rough:e}".partition("e")[2])
    return next(x * power for x in (1, 2, 5, 10) if x * power >= rough * 0.999)


def _table(title: str, rows: list[Row]) -> str:
    """The values of a chart, a line for each bar."""
    lines = [(row, [_cell(x) for x in cells]) for row in rows for cells in _cells(row)]
    used = [i for i in range(len(_HEADER)) if any(cells[i] for _, cells in lines)]
    head = "".join(f'<th scope="col">{_HEADER[i]}</th>' for i in used)
    body = "".join(
        f"<tr {facets(row)}>{''.join(f'<td>{cells[i]}</td>' for i in used)}</tr>"
        for row, cells in lines
    )
    name = escape(f"Values of {title}".replace("`", ""))
    return (
        f'<details><summary>Values as a table</summary><div class="scroll" tabindex="0" '
        f'role="region" aria-label="{name}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></details>"
    )


def _cells(row: Row) -> Iterator[Iterable[str]]:
    for bar in row.bars:
        judged = bar.ours and row.ours in (None, bar)
        bound = row.bound if judged else None
        time = bar.numbers.get("ms")
        yield (
            row.what,
            row.direction or "",
            row.dtype or "",
            "" if row.mask is None else ", ".join(masks(row)),
            bar.name,
            bar.problem or amount(bar.value, row.unit),
            "" if time is None or row.unit == "ms" else amount(time, "ms"),
            "" if bound is None else target(bound, row.better, row.unit),
            "" if bound is None else "met" if row.met else "missed",
            of_peer(row, bar),
            of_limit(row, bar),
        )


def _cell(text: str) -> str:
    return words(text)
