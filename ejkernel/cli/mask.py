"""`ejkernel mask`: draw the mask that some options make."""

from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import typer

from ejkernel.types import MaskInfo


def build(
    length: int,
    keys: int | None = None,
    documents: list[int] | None = None,
    causal: bool = False,
    offset: int = 0,
    window: tuple[int, int] | None = None,
    chunk: int | None = None,
    key_length: int | None = None,
) -> MaskInfo:
    """The MaskInfo of one row; documents that do not fill it leave padding behind them.

    >>> build(8, documents=[3, 4], causal=True).shape
    (1, 8, 8)
    """
    keys = length if keys is None else keys
    if documents and sum(documents) > min(length, keys):
        raise ValueError(
            f"mask: documents of {sum(documents)} tokens do not fit into {min(length, keys)}."
        )

    def ids(size: int) -> jnp.ndarray:
        if not documents:
            return jnp.zeros((1, size), jnp.int32)
        numbers = np.repeat(np.arange(len(documents)), documents)
        padding = np.full(size - len(numbers), -1)
        return jnp.asarray(np.concatenate([numbers, padding]), jnp.int32)[None]

    mask = MaskInfo.from_segments(ids(length), ids(keys))
    if causal:
        mask = mask.apply_causal(offset=offset)
    if window is not None:
        mask = mask.apply_sliding_window(window, offset=offset)
    if chunk is not None:
        mask = mask.apply_chunked(chunk)
    if key_length is not None:
        mask = mask.apply_kv_lengths(jnp.array([key_length]))
    return mask


def _numbers(text: str | None, option: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers like 3 or 3,4, got {text!r}.") from None


def _window(text: str | None) -> tuple[int, int] | None:
    sides = _numbers(text, "--window")
    if sides is None:
        return None
    if len(sides) > 2:
        raise typer.BadParameter(f"--window takes one number or LEFT,RIGHT, got {text!r}.")
    return sides[0], sides[-1]


def mask(
    length: Annotated[int, typer.Option(min=1, help="Number of queries.")] = 256,
    keys: Annotated[
        int | None, typer.Option(min=1, help="Number of keys; as many by default.")
    ] = None,
    documents: Annotated[
        str | None, typer.Option(help="Lengths of packed documents, e.g. 100,60,90.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="No key after the query.")] = False,
    offset: Annotated[int, typer.Option(help="Shift causal and window by this many keys.")] = 0,
    window: Annotated[str | None, typer.Option(help="LEFT,RIGHT or one number for both.")] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Causal chunks of this size.")] = None,
    key_length: Annotated[int | None, typer.Option(min=0, help="Keys that are valid.")] = None,
    block: Annotated[int, typer.Option(min=1, help="Tokens per drawn block.")] = 16,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII only.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write an SVG file instead.")] = None,
) -> None:
    """Draw a mask made from options, as text or as an SVG file."""
    lengths = _numbers(documents, "--documents")
    try:
        drawn = build(length, keys, lengths, causal, offset, _window(window), chunk, key_length)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if svg is not None:
        svg.write_text(drawn.to_svg(max_blocks=-(-max(drawn.q_len, drawn.kv_len) // block)))
        typer.echo(f"{svg}: {drawn.q_len} queries x {drawn.kv_len} keys in blocks of {block}")
        return
    charset = "ascii" if ascii_only else "unicode"
    typer.echo(drawn.visualize(block_size=block, charset=charset, return_str=True))
