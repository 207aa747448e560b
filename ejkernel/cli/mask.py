"""`ejkernel mask`: draw the mask that some options make."""

import dataclasses
import itertools
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from ejkernel.cli import output
from ejkernel.cli.picture import Picture, Style, legend
from ejkernel.types import MaskInfo

_DEFAULT_LENGTH = 256
_LONGEST = 100_000_000  # the mask holds a few numbers for each token
_LINES_AROUND = 6  # title, key numbers, frame, legend and the prompt
_SVG_BLOCKS = 128
_GALLERY_COLUMNS, _GALLERY_WIDTH, _GALLERY_LINES = 3, 25, 6


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A mask as the options describe it: one batch row, one head."""

    length: int
    keys: int | None = None
    documents: tuple[int, ...] = ()
    causal: bool = False
    offset: int = 0
    window: tuple[int, int] | None = None
    chunk: int | None = None
    key_length: int | None = None

    def build(self) -> MaskInfo:
        """The mask; documents that do not fill it leave padding behind them.

        >>> Recipe(8, documents=(3, 4), causal=True).build().shape
        (1, 8, 8)
        """
        shorter = min(self.length, self.keys or self.length)
        if self.documents and sum(self.documents) > shorter:
            raise ValueError(
                f"mask: documents of {sum(self.documents)} tokens do not fit into {shorter}."
            )
        if short := [length for length in self.documents if length < 1]:
            raise ValueError(f"mask: a document has at least 1 token, got {short[0]}.")
        mask = MaskInfo.from_segments(self._ids(self.length), self._ids(self.keys or self.length))
        if self.causal:
            mask = mask.apply_causal(offset=self.offset)
        if self.window is not None:
            mask = mask.apply_sliding_window(self.window, offset=self.offset)
        if self.chunk is not None:
            mask = mask.apply_chunked(self.chunk)
        if self.key_length is not None:
            mask = mask.apply_kv_lengths(jnp.array([self.key_length]))
        return mask

    def _ids(self, size: int) -> jnp.ndarray:
        if not self.documents:
            return jnp.zeros((1, size), jnp.int32)
        numbers = np.repeat(np.arange(len(self.documents)), self.documents)
        padding = np.full(size - len(numbers), -1)
        return jnp.asarray(np.concatenate([numbers, padding]), jnp.int32)[None]

    def rules(self) -> list[str]:
        """The rules of the mask, written as options without their dashes."""
        given: dict[str, object] = {
            "causal": "" if self.causal else None,
            "window": self.window and f"{self.window[0]},{self.window[1]}",
            "offset": self.offset or None,
            "documents": ",".join(map(str, self.documents)) or None,
            "chunk": self.chunk,
            "key-length": self.key_length,
        }
        return [f"{name} {value}".strip() for name, value in given.items() if value is not None]


_GALLERY = {
    "causal": Recipe(96, causal=True),
    "sliding window": Recipe(96, causal=True, window=(24, 0)),
    "chunked": Recipe(96, chunk=32),
    "packed documents": Recipe(96, documents=(40, 24, 32)),
    "packed, causal": Recipe(96, causal=True, documents=(40, 24, 32)),
    "packed, causal, window": Recipe(96, causal=True, window=(12, 0), documents=(40, 24, 32)),
}


def _numbers(text: str | None, option: str) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers like 3 or 3,4, got {text!r}.") from None


def _window(text: str | None) -> tuple[int, int] | None:
    sides = _numbers(text, "--window")
    if len(sides) > 2:
        raise typer.BadParameter(f"--window takes one number or LEFT,RIGHT, got {text!r}.")
    return (sides[0], sides[-1]) if sides else None


def _style(console: Console, ascii_only: bool) -> Style:
    ascii_only = ascii_only or not console.encoding.startswith("utf")
    colours = console.color_system is not None and not console.no_color
    return Style(ascii_only, colours and not ascii_only)


def _print_picture(
    console: Console, style: Style, recipe: Recipe, mask: MaskInfo, block: int | None
) -> None:
    """Title, picture and legend, as large as the terminal allows."""
    around = len(str(mask.q_len)) + 1 + 2 * style.side
    columns = max(1, (console.width - around) // style.pixel[0])
    rows = max(1, 2 * (console.height - _LINES_AROUND) // style.pixel[1])
    picture = Picture.fitting(mask, columns, rows, block)
    rules = ", ".join(recipe.rules()) or "all pairs allowed"
    sizes = f"{mask.q_len} queries x {mask.kv_len} keys"
    for line in (Text(f"{sizes}: {rules}", "bold"), *picture.framed(style)):
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
    scale = f"  (pixel: {picture.block_q} x {picture.block_k})"
    console.print(Text.assemble(legend(style), scale), no_wrap=True, overflow="ellipsis")


def _print_gallery(console: Console, style: Style) -> None:
    """Small masks next to each other, and the options that make them."""
    columns, rows = _GALLERY_WIDTH // style.pixel[0], 2 * _GALLERY_LINES // style.pixel[1]
    names = iter(_GALLERY)
    while row := list(itertools.islice(names, _GALLERY_COLUMNS)):
        pictures = [
            Picture.fitting(_GALLERY[name].build(), columns, rows, None).lines(style)
            for name in row
        ]
        titles = [Text(name, "bold") for name in row]
        for cells in (titles, *zip(*pictures, strict=True)):
            for cell in cells:
                cell.pad_right(_GALLERY_WIDTH + 2 - len(cell))
            line = Text.assemble(*cells)
            line.rstrip()
            console.print(line, no_wrap=True, crop=True)
    console.print(legend(style))
    for name, recipe in _GALLERY.items():
        options = " ".join(f"--{rule}" for rule in recipe.rules())
        console.print(f"{name:<24}--length {recipe.length} {options}", highlight=False)
    console.print("All options: ejkernel mask --help", highlight=False)


def mask(
    length: Annotated[
        int | None, typer.Option(min=1, max=_LONGEST, help="Number of queries (default 256).")
    ] = None,
    keys: Annotated[
        int | None,
        typer.Option(min=1, max=_LONGEST, help="Number of keys; by default that of the queries."),
    ] = None,
    documents: Annotated[
        str | None, typer.Option(help="Lengths of packed documents, e.g. 100,60,90.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="No key after the query.")] = False,
    offset: Annotated[int, typer.Option(help="Shift causal and window by this many keys.")] = 0,
    window: Annotated[str | None, typer.Option(help="LEFT,RIGHT or one number for both.")] = None,
    chunk: Annotated[
        int | None, typer.Option(min=1, max=_LONGEST, help="Causal chunks of this size.")
    ] = None,
    key_length: Annotated[
        int | None, typer.Option(min=0, max=_LONGEST, help="Number of valid keys.")
    ] = None,
    block: Annotated[
        int | None, typer.Option(min=1, help="Tokens per pixel; by default what fits.")
    ] = None,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII only.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write an SVG file instead.")] = None,
) -> None:
    """Draw an attention mask; without options, show examples."""
    if offset and not (causal or window is not None):
        raise typer.BadParameter("it shifts --causal or --window; give one.", param_hint="--offset")
    output.check(svg, "--svg")
    recipe = Recipe(
        length or _DEFAULT_LENGTH,
        keys,
        _numbers(documents, "--documents"),
        causal,
        offset,
        _window(window),
        chunk,
        key_length,
    )
    console = Console()
    style = _style(console, ascii_only)
    if svg is None and length is None and recipe == Recipe(_DEFAULT_LENGTH):
        _print_gallery(console, style)
        return
    try:
        drawn = recipe.build()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if svg is None:
        _print_picture(console, style, recipe, drawn, block)
        return
    block = block or -(-max(drawn.q_len, drawn.kv_len) // _SVG_BLOCKS)
    text = drawn.to_svg(max_blocks=-(-max(drawn.q_len, drawn.kv_len) // block))
    output.write(svg, text, "--svg")
    typer.echo(f"{svg}: {drawn.q_len} queries x {drawn.kv_len} keys in blocks of {block}")
