"""Bar charts as SVG, written by hand so that the same results give the same bytes."""

import dataclasses
from html import escape
from typing import Literal

from benchmarks.report.speed import Comparison
from ejkernel.cli.report import limits

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")

_WIDTH, _LABELS, _RIGHT = 800, 338, 56
_TOP, _ROW, _BAR, _BOTTOM = 62, 46, 15, 34
_LONGEST_LABEL = 110
_STEP = 200  # TFLOP/s between grid lines
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclasses.dataclass(frozen=True)
class _Colours:
    text: str
    muted: str
    grid: str
    ours: str
    peer: str
    on_peer: str
    limit: str


_COLOURS: dict[Theme, _Colours] = {
    "light": _Colours("#1f2328", "#59636e", "#d1d9e0", "#0969da", "#b6bfc8", "#1f2328", "#cf222e"),
    "dark": _Colours("#f0f6fc", "#9198a1", "#3d444d", "#316dca", "#5a626c", "#ffffff", "#f85149"),
}


def text_colours(theme: Theme) -> tuple[str, str]:
    """The colours of words, and of those that matter less."""
    return _COLOURS[theme].text, _COLOURS[theme].muted


def text(x: float, y: float, words: str, colour: str, size: int = 12, **attributes: str) -> str:
    """A `<text>` element."""
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    place = f'x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}"'
    return f"<text {place}{extra}>{escape(words)}</text>"


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{_BAR}" rx="2" fill="{colour}"/>'


def _scale(rate: float) -> float:
    """TFLOP/s to pixels."""
    return rate * (_WIDTH - _LABELS - _RIGHT) / limits.H200_TFLOPS


def _grid(colours: _Colours, bottom: float) -> list[str]:
    """Grid lines, and the measured matmul peak."""
    lines = []
    for rate in range(0, int(limits.H200_TFLOPS), _STEP):
        x = _LABELS + _scale(rate)
        lines.append(f'<path d="M{x:.1f} {_TOP - 8}V{bottom:g}" stroke="{colours.grid}"/>')
        lines.append(text(x, bottom + 16, f"{rate}", colours.muted, 11, text_anchor="middle"))
    x = _LABELS + _scale(limits.H200_TFLOPS)
    lines.append(
        f'<path d="M{x:.1f} {_TOP - 8}V{bottom:g}" stroke="{colours.limit}" '
        'stroke-width="1.5" stroke-dasharray="4 3"/>'
    )
    limit = f"measured matmul peak {limits.H200_TFLOPS:.0f}"
    lines.append(text(_WIDTH, bottom + 16, limit, colours.limit, 11, text_anchor="end"))
    return lines


def _hovered(said: str, elements: list[str]) -> list[str]:
    """Elements that show what they say when the pointer is on them."""
    return [f"<g><title>{escape(said)}</title>", *elements, "</g>"]


def _labelled(y: float, rate: float, words: str, bar: str, inside: str, outside: str) -> list[str]:
    """A bar with its label at its end: inside, or behind a bar that is too short for it."""
    width = _scale(rate)
    long = width > _LONGEST_LABEL
    x, anchor = (_LABELS + width - 6, "end") if long else (_LABELS + width + 6, "start")
    colour = inside if long else outside
    label = text(x, y + _BAR - 3.5, words, colour, 11, text_anchor=anchor, font_weight="600")
    return [_bar(_LABELS, y, width, bar), label]


def _limit(rate: float) -> str:
    return f"{rate:.1f} TFLOP/s, {rate / limits.H200_TFLOPS:.0%} of the measured matmul peak"


def _row(one: Comparison, y: float, colours: _Colours) -> list[str]:
    """One call: its label, our bar, the bar of the best timed peer."""
    ratio = "" if one.ratio is None else f" · {one.ratio:.2f}x"
    lines = [
        text(0, y + 12, f"{one.operation}, {one.what}", colours.text, 13, font_weight="600"),
        text(0, y + 28, one.call, colours.muted, 11),
        *_hovered(
            f"ejkernel ({one.operation}, {one.what}, {one.call}): {_limit(one.ours)}",
            _labelled(y, one.ours, f"{one.ours:.0f}{ratio}", colours.ours, "#ffffff", colours.text),
        ),
    ]
    if one.theirs is not None:
        words = f"{one.theirs:.0f} · {one.peer}"
        below = y + _BAR + 2
        lines += _hovered(
            f"{one.peer} ({one.operation}, {one.what}, {one.call}): {_limit(one.theirs)}",
            _labelled(below, one.theirs, words, colours.peer, colours.on_peer, colours.text),
        )
    return lines


# A panel: its name, and groups of bars, each with a label; a bar has no share where it has none.
Bars = list[tuple[str, float | None]]
Panel = tuple[str, list[tuple[str, Bars]]]
_PANEL, _GAP, _THIN = 248, 24, 13  # width of a panel, between panels, from bar to bar
_INKS: dict[Theme, tuple[str, ...]] = {
    "light": ("#b6bfc8", "#0969da", "#8250df", "#1a7f37", "#bf8700"),
    "dark": ("#6e7681", "#316dca", "#8957e5", "#2ea043", "#d29922"),
}


def shares(title: str, panels: list[Panel], theme: Theme) -> str:
    """Panels of bars from 0 to 100 %, one colour for each name of a bar."""
    colours = _COLOURS[theme]
    names = [name for name, _ in panels[0][1][0][1]]
    inks = dict(zip(names, _INKS[theme], strict=True))
    body = [text(0, 18, title, colours.text, 16, font_weight="600")]
    for i, name in enumerate(names):
        body.append(_thin(150 * i, 33, 12, inks[name]))
        body.append(text(150 * i + 18, 42, name, colours.text, 12))
    bottom = 0.0
    for i, (name, groups) in enumerate(panels):
        left = i * (_PANEL + _GAP)
        body.append(text(left, 68, name, colours.text, 13, font_weight="600"))
        y = 78.0
        for label, bars in groups:
            body.append(text(left, y + 14, label, colours.muted, 11))
            body.append(f'<path d="M{left} {y + 18:g}h{_PANEL - 40}" stroke="{colours.grid}"/>')
            for j, (form, share) in enumerate(bars):
                exact = "too large" if share is None else f"{share:.1%}"
                body += _hovered(
                    f"{name}, {label}, {form}: {exact}",
                    _share(left, y + 21 + _THIN * j, share, inks[form], colours),
                )
            y += 28 + _THIN * len(bars)
        bottom = max(bottom, y)
    said = "; ".join(
        f"{panel}, {label}, {form}: {'too large' if share is None else f'{share:.0%}'}"
        for panel, groups in panels
        for label, bars in groups
        for form, share in bars
    )
    return document(title, said, body, bottom + 8)


def _thin(x: float, y: float, width: float, colour: str) -> str:
    height = _THIN - 3
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _share(x: float, y: float, share: float | None, ink: str, colours: _Colours) -> list[str]:
    """A bar with its share behind it."""
    width = (_PANEL - 40) * (share or 0)
    words = "too large" if share is None else f"{share:.0%}" if share >= 0.01 else "<1%"
    return [
        _thin(x, y, width, ink),
        text(x + width + 4, y + _THIN - 4, words, colours.muted, 10),
    ]


def chart(title: str, rows: list[Comparison], theme: Theme) -> str:
    """A chart of TFLOP/s, ours against the best timed peer of every call."""
    colours = _COLOURS[theme]
    bottom = _TOP + _ROW * len(rows)
    height = bottom + _BOTTOM
    body = [
        text(0, 18, title, colours.text, 16, font_weight="600"),
        _bar(0, 30, 14, colours.ours),
        text(20, 42, "ours", colours.text, 12),
        _bar(64, 30, 14, colours.peer),
        text(84, 42, "best timed peer", colours.text, 12),
        text(_WIDTH, 42, "TFLOP/s, longer is better", colours.muted, 12, text_anchor="end"),
        *_grid(colours, bottom),
    ]
    for i, one in enumerate(rows):
        body += _row(one, _TOP + _ROW * i, colours)
    said = "; ".join(f"{one.operation} {one.what}, {one.call}: {one.ours:.0f}" for one in rows)
    return document(title, said, body, height)


def document(title: str, said: str, body: list[str], height: float, width: float = _WIDTH) -> str:
    """An SVG with a title, a description and these elements."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 0 {width + 16:g} {height:g}" '
            f'width="{width + 16:g}" height="{height:g}" role="img" font-family="{_FONT}">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(said)}</desc>",
            *body,
            "</svg>\n",
        ]
    )
