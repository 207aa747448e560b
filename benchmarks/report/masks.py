"""Pictures of masks as SVG: the Python blocks of docs/masks.md make the masks, this draws them."""

import re
from html import escape
from typing import Any

import numpy as np

from benchmarks.report import plot, results
from ejkernel.types import MaskInfo

PAGE = results.ROOT / "docs" / "masks.md"
_BLOCK = re.compile(r"```python\n(.*?)```\n\n(?:<picture>.*?images/mask-([\w-]+)-dark)?", re.DOTALL)
_CELL, _LEFT, _TOP = 14, 52, 40
_BACKGROUND = {"light": "#f3f5f7", "dark": "#2b3037"}
_SEEN = {
    "light": ("#0969da", "#1a7f37", "#8250df", "#bf8700"),
    "dark": ("#4184e4", "#2ea043", "#986ee2", "#c69026"),
}


def drawn() -> dict[str, MaskInfo]:
    """The mask of every picture: what `mask` is after the block before it."""
    namespace: dict[str, Any] = {}
    found = {}
    for source, name in _BLOCK.findall(PAGE.read_text()):
        exec(compile(source, PAGE.name, "exec"), namespace)
        if name:
            found[name] = namespace["mask"]
    return found


def picture(name: str, mask: MaskInfo, theme: plot.Theme) -> str:
    """Queries from top to bottom, keys from left to right; a row is coloured by its segment."""
    seen = np.asarray(mask.attention_mask)[0, 0]
    segments = np.asarray(mask.q_segment_ids)[0]
    queries, keys = seen.shape
    text, muted = plot.text_colours(theme)
    body = [
        plot.text(_LEFT, 14, "keys", muted, 11),
        plot.text(0, _TOP + 10, "queries", muted, 11),
        f'<rect x="{_LEFT}" y="{_TOP - 14}" width="{keys * _CELL}" height="{queries * _CELL}" '
        f'rx="2" fill="{_BACKGROUND[theme]}"/>',
    ]
    for q in range(queries):
        ink = _SEEN[theme][max(int(segments[q]), 0) % 4]
        body += [_run(q, first, last, ink) for first, last in _runs(seen[q])]
    said = f"{queries} queries, {keys} keys, {int(seen.sum())} of {seen.size} pairs visible"
    body.append(plot.text(_LEFT, _TOP + queries * _CELL + 4, said, text, 11))
    width = max(_LEFT + keys * _CELL, 290)
    title = f"Mask: {name.replace('-', ' ')}"
    return plot.document(title, said, body, _TOP + queries * _CELL + 12, width)


def _runs(row: np.ndarray) -> list[tuple[int, int]]:
    """The first and the last of every run of visible keys."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
    return [(int(first), int(end) - 1) for first, end in edges.reshape(-1, 2)]


def _run(query: int, first: int, last: int, ink: str) -> str:
    keys = f"key {first}" if first == last else f"keys {first} to {last}"
    x, y = _LEFT + first * _CELL, _TOP - 14 + query * _CELL
    width = (last - first + 1) * _CELL
    said = escape(f"query {query} sees {keys}")
    cells = "".join(f"M{x + i * _CELL + 1} {y + 1}h12v12h-12z" for i in range(last - first + 1))
    area = f'<rect x="{x}" y="{y}" width="{width}" height="{_CELL}" fill="transparent"/>'
    return f'<g><title>{said}</title>{area}<path d="{cells}" fill="{ink}"/></g>'
