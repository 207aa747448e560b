"""What the TPU kernels do with blocks in VMEM: matmuls of units, loops, branches."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ejkernel.kernels.common.precision import tile_product
from ejkernel.kernels.common.refs import Index, Ref

UNIT = 512  # the largest edge of a matmul that the compiler schedules well
LANES = 128
_STRIP = 128
_MIN_ROWS = 16

# Known while tracing, or only when the kernel runs.
Condition = bool | np.bool_ | jax.Array
# A part of an axis.
Part = slice | pl.Slice


def unit_of(size: int, most: int = UNIT) -> int:
    """The largest unit that divides a block, or all of a block that is no multiple of the lanes."""
    return next((n for n in range(most, 0, -LANES) if size % n == 0), size)


def strip_of(rows: int) -> int:
    """Rows of a strip: the most that divide a tile of `rows`."""
    return next(n for n in (_STRIP, 64, 32, 16, 8) if rows % n == 0)


def pad_rows(rows: jax.Array) -> jax.Array:
    """At least 16 rows: the compiler has other layouts for fewer."""
    return jnp.pad(rows, ((0, max(0, _MIN_ROWS - rows.shape[0])), (0, 0)))


def dot(left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Contract one axis of each, accumulated in float32.

    If one operand is float32 and the other bfloat16, the float32 operand is split into two bfloat16
    whose sum lacks only its last 8 bits: two passes of the matrix unit instead of six.
    """
    if left.dtype != right.dtype:
        if left.dtype == jnp.float32:
            parts = [(part, right) for part in _split(left)]
        else:
            parts = [(left, part) for part in _split(right)]
        return dot(*parts[0], axes) + dot(*parts[1], axes)
    return tile_product(left, right, axes)


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(x.dtype)).astype(jnp.bfloat16)


def accumulated(acc: Ref, at: tuple[Part, Part], started: Condition, x: jax.Array) -> jax.Array:
    """`acc[at] + x`, or `x` where the accumulator has not been started."""
    if started is False:
        return x
    before = acc[at]
    return x + (before if started is True else jnp.where(started, before, jnp.zeros_like(before)))


def part(index: Index, size: int) -> Part:
    """Part number `index` of an axis cut into parts of `size`."""
    if isinstance(index, int):
        return pl.ds(index * size, size)
    return pl.ds(pl.multiple_of(index * size, size), size)


def branch(condition: Condition, if_true: Callable[[], None], if_false: Callable[[], None]) -> None:
    """Run one of the two, without a branch where the condition is known while tracing."""
    if isinstance(condition, bool):
        (if_true if condition else if_false)()
    else:
        jax.lax.cond(condition, if_true, if_false)


def loop(start: Index, end: Index, body: Callable[[Index], None]) -> None:
    """`body(i)` for every i; a single iteration that is known while tracing has no loop."""
    if isinstance(start, int) and isinstance(end, int) and end - start <= 1:
        if end > start:
            body(start)
        return

    def step(i: jax.Array, state: tuple[()]) -> tuple[()]:
        body(i)
        return state

    jax.lax.fori_loop(start, end, step, ())


def grid_loop(rows: int, columns: int, body: Callable[[Index, Index], None]) -> None:
    """`body(row, column)` for every pair."""
    loop(0, rows, lambda row: loop(0, columns, lambda column: body(row, column)))
