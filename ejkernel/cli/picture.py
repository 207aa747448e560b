"""A mask as a picture of terminal characters, sized to fit."""

import dataclasses
from typing import Any

import numpy as np
from rich.text import Text

from ejkernel.types import MaskInfo
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL
from ejkernel.types.drawing import coarse_states

_MOST_PARTS = 16  # a pixel is looked at in at most so many parts along each axis
_ZOOMS = (4, 2, 1)  # pixels per token of a short mask; odd ones would cut tokens in two

_COLOURS = {FULL: "bright_blue", PARTIAL: "cyan"}
# Without colours a character cannot show a full row over a partial one: these pairs share a shade.
_SHADES = {
    (FULL, FULL): "█",
    (FULL, EMPTY): "▀",
    (EMPTY, FULL): "▄",
    (FULL, PARTIAL): "▓",
    (PARTIAL, FULL): "▓",
    (PARTIAL, PARTIAL): "▒",
    (PARTIAL, EMPTY): "░",
    (EMPTY, PARTIAL): "░",
    (EMPTY, EMPTY): " ",
}
_ASCII = {FULL: "#", PARTIAL: ".", EMPTY: " "}


@dataclasses.dataclass(frozen=True)
class Style:
    """What the terminal can show: half-block characters or ASCII only, colours or none."""

    ascii_only: bool = False
    colours: bool = False

    @property
    def pixel(self) -> tuple[int, int]:
        """Columns and half lines per pixel: a character is about twice as high as wide."""
        return (2, 2) if self.ascii_only else (1, 1)

    @property
    def side(self) -> int:
        """Columns of one side of the frame."""
        return 2 if self.ascii_only else 1


@dataclasses.dataclass(frozen=True)
class Picture:
    """The states of the pixels of a mask `[rows, columns]`, and how many tokens a pixel covers."""

    states: np.ndarray
    block_q: int
    block_k: int
    zoom: int = 1  # pixels per block along each axis, for masks shorter than the screen

    @classmethod
    def fitting(cls, mask: MaskInfo, columns: int, rows: int, block: int | None) -> "Picture":
        """The picture of at most so many pixels.

        Blocks grow with the mask, so that the number of pixels, and with it the work, does not.
        With `block` tokens per pixel it may be higher than `rows`, and never wider than `columns`.
        """
        if block is None:
            block_q, block_k = _block(mask.q_len, rows), _block(mask.kv_len, columns)
        else:
            block_q = block_k = block * -(-mask.kv_len // (block * columns))
        parts = _parts(block_q), _parts(block_k)
        rule = mask.rule.row(0).head(0)
        states = coarse_states(rule, mask.q_len, mask.kv_len, block_q, block_k, parts)
        most = min(rows // len(states), columns // len(states[0])) if block is None else 1
        zoom = next((zoom for zoom in _ZOOMS if zoom <= most), 1)
        return cls(states.repeat(zoom, 0).repeat(zoom, 1), block_q, block_k, zoom)

    def lines(self, style: Style) -> list[Text]:
        """The picture as lines of characters, without a frame."""
        if style.ascii_only:
            return [Text("".join(_ASCII[int(x)] * 2 for x in row)) for row in self.states]
        states = self.states
        if len(states) % 2:
            states = np.vstack([states, np.full_like(states[:1], EMPTY)])
        draw = _coloured if style.colours else _shaded
        return [
            Text.assemble(*(draw(int(x), int(y)) for x, y in zip(upper, lower, strict=True)))
            for upper, lower in zip(states[::2], states[1::2], strict=True)
        ]

    def framed(self, style: Style) -> list[Text]:
        """The picture in a frame, with the numbers of queries at the left and keys at the top."""
        lines = self.lines(style)
        rows_per_line = 1 if style.ascii_only else 2
        numbers = [
            str(_number(i * rows_per_line, self.zoom, self.block_q)) if i % 4 == 0 else ""
            for i in range(len(lines))
        ]
        margin = max(map(len, numbers))
        width = self.states.shape[1] * style.pixel[0]
        if style.ascii_only:
            side, top = "||", f"  {'=' * width}"
            bottom = top
        else:
            side, top, bottom = "│", f"┌{'─' * width}┐", f"└{'─' * width}┘"
        indent = " " * (margin + 1)
        return [
            Text(f"{indent}{' ' * style.side}{self._key_numbers(style)}"),
            Text(indent + top),
            *(
                Text.assemble(f"{number:>{margin}} {side}", line, side)
                for number, line in zip(numbers, lines, strict=True)
            ),
            Text(indent + bottom),
        ]

    def _key_numbers(self, style: Style) -> str:
        """Key numbers over the columns they belong to, as far apart as they need to be."""
        columns, per_pixel = self.states.shape[1], style.pixel[0]
        longest = len(str(_number(columns - 1, self.zoom, self.block_k)))
        # A multiple of the zoom: a number stands over the first of the columns of its block.
        step = -(-max(8, longest + 2) // (per_pixel * self.zoom)) * self.zoom
        text = ""
        for column in range(0, columns, step):
            number = str(_number(column, self.zoom, self.block_k))
            if column + -(-len(number) // per_pixel) <= columns:
                text = text.ljust(column * per_pixel) + number
        return text


def legend(style: Style) -> Text:
    """What the characters and colours of a picture mean."""
    if style.colours:
        full, partial = (Text("██", _COLOURS[state]) for state in (FULL, PARTIAL))
        return Text.assemble(full, " full  ", partial, " partial  blank empty")
    if style.ascii_only:
        return Text("## full  .. partial  blank empty")
    return Text("█ full  ▒ partial  ▓ ░ at an edge  blank empty")


def _block(length: int, pixels: int) -> int:
    """Tokens per pixel, so that no more than `pixels` are needed and parts divide it evenly."""
    block = -(-length // pixels)
    unit = 1
    while unit * _MOST_PARTS < block:
        unit *= 2
    return -(-block // unit) * unit


def _parts(block: int) -> int:
    return max(parts for parts in range(1, _MOST_PARTS + 1) if block % parts == 0)


def _number(pixel: int, zoom: int, block: int) -> int:
    """The first token of a pixel."""
    return pixel // zoom * block


def _shaded(upper: int, lower: int) -> str:
    return _SHADES[upper, lower]


def _coloured(upper: int, lower: int) -> Any:
    """A half-block character and its style."""
    if upper == lower:
        return ("█", _COLOURS[upper]) if upper != EMPTY else " "
    if upper == EMPTY:
        return "▄", _COLOURS[lower]
    background = "" if lower == EMPTY else f" on {_COLOURS[lower]}"
    return "▀", _COLOURS[upper] + background
