"""A mask as text for a terminal."""

import math
from typing import TYPE_CHECKING

from ejkernel.types.arguments import choice, concrete, static_integer
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL
from ejkernel.types.drawing import MIXED, PADDING, Drawing, Label, draw

if TYPE_CHECKING:
    from ejkernel.types.mask import MaskInfo

_FILLS = {
    "unicode": {FULL: "██", PARTIAL: "░░", EMPTY: "  "},
    "ascii": {FULL: "##", PARTIAL: "..", EMPTY: "  "},
}
_MASK_LEGEND = "Legend mask: full='██'/##, partial='░░'/.., empty='  '"
_SEGMENT_LEGEND = "Legend seg: left=Q block ID, top=KV block ID, PAD=-1, MIX=??"


def check_head(where: str, mask: "MaskInfo", batch: int, head: int) -> None:
    """Refuse a batch row or head that the mask does not have, and a mask without values."""
    if not concrete(mask):
        raise ValueError(f"{where}: a mask that is being traced has no values to show.")
    rows, heads = mask.batch_size or 1, mask.rule.heads
    if not 0 <= batch < rows:
        raise IndexError(f"{where}: batch must be within 0 and {rows - 1}, got {batch}.")
    if not 0 <= head < heads:
        raise IndexError(f"{where}: head must be within 0 and {heads - 1}, got {head}.")


def render_text(
    mask: "MaskInfo",
    block_size: int,
    batch: int,
    head: int,
    screen: tuple[int, int] | None,
    charset: str,
    show_segments: bool,
) -> str:
    """What `MaskInfo.visualize` prints; `screen` is the most rows and columns of blocks."""
    where = "MaskInfo.visualize"
    check_head(where, mask, batch, head)
    choice(f"{where}: charset", charset, tuple(_FILLS))
    block_q = block_k = static_integer(f"{where}: block_size", block_size, 1)
    if screen is not None:
        most_rows = static_integer(f"{where}: max_rows", screen[0], 1)
        most_columns = static_integer(f"{where}: max_cols", screen[1], 1)
        block_q *= _grouping(mask.q_len, block_q, most_rows)
        block_k *= _grouping(mask.kv_len, block_k, most_columns)
    drawing = draw(mask, batch, head, block_q, block_k)
    shape = (mask.batch_size or 1, mask.rule.heads, mask.q_len, mask.kv_len)
    header = (
        f"Attention mask (batch={batch}, head={head}) block=({block_q}x{block_k}) "
        f"mask_shape={shape}"
    )
    legend = [_MASK_LEGEND, _SEGMENT_LEGEND] if show_segments else [_MASK_LEGEND]
    return "\n".join([header, *_body(drawing, _FILLS[charset], show_segments), *legend])


def _body(drawing: Drawing, fills: dict[int, str], show_segments: bool) -> list[str]:
    left = [_left_label(label) if show_segments else "" for label in drawing.q_labels]
    width = max(map(len, left))
    margin = " " * (width + bool(width))
    lines = []
    if show_segments:
        top = "".join(_top_label(label) for label in drawing.kv_labels)
        lines.append(f"{margin}  {top}".rstrip())
    rule = f"{margin}  {'==' * drawing.states.shape[1]}"
    lines.append(rule)
    for label, row in zip(left, drawing.states, strict=True):
        blocks = "".join(fills[int(state)] for state in row)
        lines.append(f"{label.rjust(width)}{' ' * bool(width)}||{blocks}||")
    return [*lines, rule]


def _left_label(label: Label) -> str:
    if isinstance(label, int):
        return f"{label:02d}"
    return {MIXED: "MIX", PADDING: "PAD"}[label]


def _top_label(label: Label) -> str:
    """Two characters, as wide as a block; of a longer id the last two digits."""
    if isinstance(label, int):
        return f"{label % 100:02d}"
    return {MIXED: "??", PADDING: "  "}[label]


def _grouping(length: int, block: int, most: int) -> int:
    """How many blocks to draw as one so that at most `most` are drawn."""
    return math.ceil(math.ceil(length / block) / most)
