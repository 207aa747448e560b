"""A mask as a picture for a notebook."""

import html
from typing import TYPE_CHECKING

import numpy as np

from ejkernel.types.arguments import concrete
from ejkernel.types.block_map import FULL, PARTIAL
from ejkernel.types.drawing import PADDING, Drawing, Label, draw
from ejkernel.types.render import check_head

if TYPE_CHECKING:
    from ejkernel.types.mask import MaskInfo

_FULL_COLOUR, _PARTIAL_COLOUR, _EMPTY_COLOUR = "#27598c", "#93b9dc", "#f3f4f6"
_PIXELS = 320  # of the longer side
_STRIP = 8  # width of the strips that show segments


def render_svg(mask: "MaskInfo", batch: int, head: int, max_blocks: int) -> str:
    """What `MaskInfo.to_svg` returns."""
    check_head("MaskInfo.to_svg", mask, batch, head)
    longest = max(mask.q_len, mask.kv_len)
    block = -(-longest // max_blocks)
    drawing = draw(mask, batch, head, block, block)
    cell = max(2, _PIXELS // -(-longest // block))
    rows, columns = drawing.states.shape
    width, height = _STRIP + 2 + columns * cell, _STRIP + 2 + rows * cell
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">',
            f"<title>Attention mask, batch {batch}, head {head}, blocks of {block}</title>",
            *_strips(drawing, cell),
            f'<g transform="translate({_STRIP + 2},{_STRIP + 2})">',
            f'<rect width="{columns * cell}" height="{rows * cell}" fill="{_EMPTY_COLOUR}"/>',
            *_cells(drawing.states, cell),
            "</g></svg>",
        ]
    )


def render_html(mask: "MaskInfo") -> str:
    """What a notebook shows of a mask: its picture and a line about it."""
    text = html.escape(repr(mask))
    if not concrete(mask):
        return f"<code>{text}</code>"
    legend = "".join(
        f'<span style="display:inline-block;width:0.8em;height:0.8em;margin:0 0.3em 0 0.9em;'
        f'border:1px solid #999;background:{colour}"></span>{name}'
        for name, colour in (
            ("full", _FULL_COLOUR),
            ("partial", _PARTIAL_COLOUR),
            ("empty", _EMPTY_COLOUR),
        )
    )
    caption = f"batch 0, head 0, queries down, keys across{legend}"
    return (
        f'<div><code>{text}</code><div style="margin:0.4em 0">{render_svg(mask, 0, 0, 64)}</div>'
        f'<div style="font-size:0.85em">{caption}</div></div>'
    )


def _cells(states: np.ndarray, cell: int) -> list[str]:
    """One rectangle for each run of equal blocks in a row."""
    rectangles = []
    for i, row in enumerate(states):
        ends = np.flatnonzero(np.diff(row)) + 1
        for begin, end in zip([0, *ends], [*ends, len(row)], strict=True):
            colour = {FULL: _FULL_COLOUR, PARTIAL: _PARTIAL_COLOUR}.get(int(row[begin]))
            if colour is not None:
                rectangles.append(
                    f'<rect x="{begin * cell}" y="{i * cell}" width="{(end - begin) * cell}" '
                    f'height="{cell}" fill="{colour}"/>'
                )
    return rectangles


def _strips(drawing: Drawing, cell: int) -> list[str]:
    """The segments of the queries on the left and of the keys on top."""
    place = _STRIP + 2
    left = [
        f'<rect x="0" y="{place + i * cell}" width="{_STRIP}" height="{cell}" '
        f'fill="{_label_colour(label)}"/>'
        for i, label in enumerate(drawing.q_labels)
    ]
    top = [
        f'<rect x="{place + j * cell}" y="0" width="{cell}" height="{_STRIP}" '
        f'fill="{_label_colour(label)}"/>'
        for j, label in enumerate(drawing.kv_labels)
    ]
    return left + top


def _label_colour(label: Label) -> str:
    if not isinstance(label, int):
        return "#ffffff" if label == PADDING else "#9ca3af"
    # Steps of the golden angle keep the hues of neighbouring ids apart.
    return f"hsl({round(label * 137.508) % 360},55%,60%)"
