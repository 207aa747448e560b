"""What the examples share: a text to train on, parts of a transformer, and how they report."""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


def corpus() -> np.ndarray:
    """The text of corpus.txt as an array of bytes, the tokens."""
    text = Path(__file__).with_name("corpus.txt").read_bytes()
    return np.frombuffer(text, np.uint8).astype(np.int32)


def normalize(x: jax.Array) -> jax.Array:
    """Root mean square normalisation of the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of queries or keys [..., length, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * 1e4 ** (-jnp.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def same_choice(
    scores: np.ndarray, tokens: np.ndarray, tolerance: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens have the best score, and which others are near-ties: best up to `tolerance`.

    Two programs that compute the same scores round them differently. Where the two best scores
    are closer than the rounding errors, they may select different tokens.
    """
    chosen = np.take_along_axis(scores, np.asarray(tokens)[..., None], axis=-1)[..., 0]
    behind = scores.max(-1) - chosen
    return behind == 0, (behind > 0) & (behind <= tolerance)


def near_ties(count: int) -> str:
    """What a claim says about near-ties."""
    return f" ({count} near-ties)" if count else ""


def check(claim: str, holds: bool) -> None:
    """Print a claim that holds; stop the program with exit status 1 at one that does not."""
    print(f"{'ok' if holds else 'FAILED'}: {claim}")
    if not holds:
        sys.exit(1)


def table(*rows: Sequence[object]) -> None:
    """Print rows of cells, the first of them the header."""
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for i, row in enumerate(cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        if i == 0:
            print("  ".join("-" * width for width in widths))


def curve(title: str, values: Sequence[float], file: str | None = None) -> None:
    """Print a line chart of values over their index; with a file name also draw it there."""
    columns = [float(np.mean(x)) for x in np.array_split(values, min(60, len(values)))]
    low, high, height = min(columns), max(columns), 8
    rows = [round((height - 1) * (high - x) / ((high - low) or 1)) for x in columns]
    print(f"\n{title}")
    for i in range(height):
        level = high - (high - low) * i / (height - 1)
        print(f"{level:9.3g} |" + "".join("*" if row == i else " " for row in rows).rstrip())
    if file is not None:
        from matplotlib.figure import Figure

        figure = Figure()
        figure.subplots().plot(values)
        figure.suptitle(title)
        figure.savefig(file)
