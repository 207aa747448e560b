"""Both products of grouped matmul on TPU.

A step of the grid brings a tile of rows and one weight's block into VMEM; there they are multiplied
in units of up to 512 x 512 x 512, the most that the compiler schedules well. A tile that belongs to
one group goes in whole units. Of a tile that groups share only the rows in question are computed,
in strips.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ejkernel import settings
from ejkernel.kernels.common.precision import tile_product
from ejkernel.kernels.grouped_matmul.layout import Layout
from ejkernel.kernels.grouped_matmul.row_tiles import FIRST, FLAGS, LAST, STATE, row_tiles
from ejkernel.types.block_map import EMPTY, FULL

UNIT = 512
STRIP = 128
LEAST_ROWS = 16


class Blocks(NamedTuple):
    """What a step has in VMEM: rows, columns of the result, and along the sum; bytes in all."""

    rows: int
    columns: int
    depth: int
    vmem: int


def unit_of(size: int, most: int = UNIT) -> int:
    """The largest unit that divides a block, or all of a block that is no multiple of the lanes."""
    return next((n for n in range(most, 0, -128) if size % n == 0), size)


def strip_of(rows: int) -> int:
    """Rows of a strip, of which a tile has a whole number."""
    return next(n for n in (STRIP, 64, 32, 16, 8) if rows % n == 0)


def times_weights(
    rows: Float[Array, "m c"],
    weights: Float[Array, "e _ _"],
    axis: int,
    layout: Layout,
    dtype: Any,
    blocks: Blocks,
) -> Float[Array, "m d"]:
    """Each row times its weight, contracted with this axis of it; 0 for rows without a weight."""
    count, rows = rows.shape[0], _padded(rows)
    (total, depth), columns = rows.shape, weights.shape[3 - axis]
    tiles = row_tiles(layout, total, blocks.rows)
    parts = -(-depth // blocks.depth)
    call = _RowsCall(axis, depth, parts, min(blocks.depth, UNIT))

    def part_of(step, part, packed):
        return 0 if parts == 1 else jnp.where(packed[step] & STATE == EMPTY, 0, part)

    def rows_at(column, step, part, tile, packed, source, *_):
        return source[step], part_of(step, part, packed)

    def weights_at(column, step, part, tile, packed, *_):
        part, weight = part_of(step, part, packed), jax.lax.shift_right_logical(packed[step], FLAGS)
        return (weight, part, column) if axis == 1 else (weight, column, part)

    matrix = (blocks.depth, blocks.columns) if axis == 1 else (blocks.columns, blocks.depth)
    return pl.pallas_call(
        call.kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(-(-columns // blocks.columns), tiles.count, parts),
            in_specs=[
                pl.BlockSpec((blocks.rows, blocks.depth), rows_at),
                pl.BlockSpec((None, *matrix), weights_at),
            ],
            out_specs=pl.BlockSpec(
                (blocks.rows, blocks.columns),
                lambda column, step, part, tile, *_: (tile[step], column),
            ),
            scratch_shapes=[pltpu.VMEM((blocks.rows, blocks.columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((total, columns), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=blocks.vmem,
            disable_bounds_checks=True,  # the list names no block that is not there
        ),
        interpret=settings.interpret(),
    )(*tiles.scalars(), rows, weights)[:count]


def _padded(rows: jax.Array) -> jax.Array:
    """At least a tile of memory's rows: the compiler has layouts of its own for fewer."""
    return jnp.pad(rows, ((0, max(0, LEAST_ROWS - rows.shape[0])), (0, 0)))


class _RowsCall(NamedTuple):
    """Rows times weights: contracted with this axis, so deep, in so many parts of such chunks."""

    axis: int
    depth: int
    parts: int
    chunk: int

    def kernel(self, tile, packed, _, starts, ends, rows, weights, out, sums) -> None:
        step, part = pl.program_id(1), pl.program_id(2)
        final = self.parts == 1 or part == self.parts - 1
        height, width = out.shape
        wide = unit_of(width)
        # All chunks but the last, which may be shorter, and what is begun when they are done.
        chunks = -(-rows.shape[1] // self.chunk) - 1
        last = slice(chunks * self.chunk, rows.shape[1])
        begun = chunks > 0 or (self.parts > 1 and part > 0)

        def product(at: Any, columns: Any, depth: Any) -> jax.Array:
            one = rows[at, depth]
            other = weights[depth, columns] if self.axis == 1 else weights[columns, depth]
            if self.depth != rows.shape[1] * self.parts:
                one, other = self._cut(one, other, part * rows.shape[1] + depth.start)
            return dot(one, other, (1, self.axis - 1))

        def add(at: Any, columns: Any, depth: Any, before: Any) -> None:
            sums[at, columns] = plus(sums, (at, columns), before, product(at, columns, depth))

        def add_chunks(at: Any, columns: Any) -> None:
            def chunk(i: Any) -> None:
                add(
                    at,
                    columns,
                    _ds(i, self.chunk),
                    i > 0 if self.parts == 1 else (part > 0) | (i > 0),
                )

            loop(0, chunks, chunk)

        def whole_tile() -> None:
            def unit(row: Any, column: Any) -> None:
                at, columns = _ds(row, unit_of(height)), _ds(column, wide)
                add_chunks(at, columns)

                def finish() -> None:
                    total = plus(sums, (at, columns), begun, product(at, columns, last))
                    out[at, columns] = total.astype(out.dtype)

                either(final, finish, lambda: add(at, columns, last, begun))

            grid(height // unit_of(height), width // wide, unit)

        def rows_of_group() -> None:
            @pl.when((packed[step] & FIRST > 0) & (part == 0))
            def _():
                # Rows of no group stay so; those of the groups are written by their steps.
                out[...] = jnp.zeros_like(out)

            weight, top = jax.lax.shift_right_logical(packed[step], FLAGS), tile[step] * height
            low, high = jnp.maximum(starts[weight] - top, 0), ends[weight] - top
            strip = strip_of(height)

            def unit(row: Any, column: Any) -> None:
                at, columns = _ds(row, strip), _ds(column, wide)
                add_chunks(at, columns)
                add(at, columns, last, begun)

                def finish() -> None:
                    index = row * strip + jax.lax.broadcasted_iota(jnp.int32, (strip, 1), 0)
                    inside = (index >= low) & (index < high)
                    total = sums[at, columns].astype(out.dtype)
                    out[at, columns] = jnp.where(inside, total, out[at, columns])

                either(final, finish, lambda: None)

            strips = pl.cdiv(jnp.minimum(high, height), strip)
            loop(
                jax.lax.div(low, strip),
                strips,
                lambda row: loop(0, width // wide, lambda column: unit(row, column)),
            )

        either(packed[step] & STATE == FULL, whole_tile, rows_of_group)

    def _cut(self, one: jax.Array, other: jax.Array, start: Any) -> tuple[jax.Array, jax.Array]:
        """Both with 0 past the end of the sum: there may be NaN, and 0 times NaN is not 0."""
        of = lambda shape, axis: (
            start + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < self.depth
        )
        size = one.shape[1]
        shape = (size, 1) if self.axis == 1 else (1, size)
        return (
            jnp.where(of((1, size), 1), one, jnp.zeros_like(one)),
            jnp.where(of(shape, self.axis - 1), other, jnp.zeros_like(other)),
        )


def rows_times_rows(
    left: Float[Array, "m c"],
    right: Float[Array, "m d"],
    layout: Layout,
    dtype: Any,
    blocks: Blocks,
) -> Float[Array, "e c d"]:
    """For each weight the sum over its rows of `left[r] right[r]^T`; 0 for a group of no rows.

    The result has blocks of `blocks.depth` by `blocks.columns`.
    """
    left, right = _padded(left), _padded(right)
    total, shape = left.shape[0], (left.shape[1], right.shape[1])
    tiles = row_tiles(layout, total, blocks.rows, by_weight=True)
    block = (blocks.depth, blocks.columns)

    return pl.pallas_call(
        _sum_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(-(-shape[0] // block[0]), -(-shape[1] // block[1]), tiles.count),
            in_specs=[
                pl.BlockSpec(
                    (blocks.rows, block[0]),
                    lambda i, j, step, tile, packed, source, *_: (source[step], i),
                ),
                pl.BlockSpec(
                    (blocks.rows, block[1]),
                    lambda i, j, step, tile, packed, source, *_: (source[step], j),
                ),
            ],
            out_specs=pl.BlockSpec(
                (None, *block),
                lambda i, j, step, tile, packed, *_: (
                    jax.lax.shift_right_logical(packed[step], FLAGS),
                    i,
                    j,
                ),
            ),
            scratch_shapes=[] if dtype == jnp.float32 else [pltpu.VMEM(block, jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((layout.starts.shape[0], *shape), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=blocks.vmem,
            disable_bounds_checks=True,  # the list names no block that is not there
        ),
        interpret=settings.interpret(),
    )(*tiles.scalars(), left, right)


def _sum_kernel(tile, packed, _, starts, ends, left, right, out, *scratch) -> None:
    sums = scratch[0] if scratch else out
    step = pl.program_id(2)
    weight, begun = jax.lax.shift_right_logical(packed[step], FLAGS), packed[step] & FIRST == 0
    height, (tall, wide) = left.shape[0], map(unit_of, sums.shape)
    many = (sums.shape[0] // tall, sums.shape[1] // wide)

    def add(one: jax.Array, other: jax.Array, i: Any, j: Any, before: Any) -> None:
        at = (_ds(i, tall), _ds(j, wide))
        sums[at] = plus(sums, at, before, dot(one, other, (0, 0)))

    def whole_tile() -> None:
        depth = unit_of(height)

        def unit(i: Any, j: Any) -> None:
            def rows(row: Any) -> None:
                one, other = (
                    left[_ds(row, depth), _ds(i, tall)],
                    right[_ds(row, depth), _ds(j, wide)],
                )
                add(one, other, i, j, begun | (row > 0))

            loop(0, height // depth, rows)

        grid(*many, unit)

    def rows_of_group() -> None:
        top, strip = tile[step] * height, strip_of(height)
        low, high = jnp.maximum(starts[weight] - top, 0), ends[weight] - top
        first = jax.lax.div(low, strip)

        @pl.when(packed[step] & STATE == EMPTY)
        def _():
            out[...] = jnp.zeros_like(out)

        def rows(row: Any) -> None:
            index = row * strip + jax.lax.broadcasted_iota(jnp.int32, (strip, 1), 0)
            inside = (index >= low) & (index < high)

            def unit(i: Any, j: Any) -> None:
                one, other = (
                    left[_ds(row, strip), _ds(i, tall)],
                    right[_ds(row, strip), _ds(j, wide)],
                )
                # Both: what stands outside may be NaN, and 0 times NaN is not 0.
                one = jnp.where(inside, one, jnp.zeros_like(one))
                other = jnp.where(inside, other, jnp.zeros_like(other))
                add(one, other, i, j, begun | (row > first))

            grid(*many, unit)

        loop(first, pl.cdiv(jnp.minimum(high, height), strip), rows)

    either(packed[step] & STATE == FULL, whole_tile, rows_of_group)
    if not scratch:
        return

    @pl.when((packed[step] & LAST > 0) & (packed[step] & STATE != EMPTY))
    def _():
        out[...] = sums[...].astype(out.dtype)


def dot(left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Contract one axis of each, accumulated in float32.

    Of different dtypes, a float32 and a bfloat16 array, the first is split into the two bfloat16
    that sum up to it but for its last 8 bits: two passes of the matrix unit instead of six.
    """
    if left.dtype != right.dtype:
        if left.dtype == jnp.float32:
            parts = [(part, right) for part in _halves(left)]
        else:
            parts = [(left, part) for part in _halves(right)]
        return dot(*parts[0], axes) + dot(*parts[1], axes)
    return tile_product(left, right, axes)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(x.dtype)).astype(jnp.bfloat16)


def plus(sums: Any, at: Any, begun: Any, x: jax.Array) -> jax.Array:
    """x, and what the sums hold where they have begun."""
    if begun is False:
        return x
    before = sums[at]
    return x + (before if begun is True else jnp.where(begun, before, jnp.zeros_like(before)))


def _ds(index: Any, size: int) -> Any:
    """Unit number `index` of an axis."""
    if isinstance(index, int):
        return pl.ds(index * size, size)
    return pl.ds(pl.multiple_of(index * size, size), size)


def either(condition: Any, one: Callable[[], None], other: Callable[[], None]) -> None:
    """Do one or the other, without a branch where it is known which."""
    if isinstance(condition, bool):
        (one if condition else other)()
    else:
        jax.lax.cond(condition, one, other)


def loop(start: Any, end: Any, body: Callable[[Any], Any]) -> None:
    """`body(i)` for every i; where there is but one, without a loop."""
    if isinstance(start, int) and isinstance(end, int) and end - start <= 1:
        if end > start:
            body(start)
        return

    def step(i: Any, state: tuple[()]) -> tuple[()]:
        body(i)
        return state

    jax.lax.fori_loop(start, end, step, ())


def grid(rows: int, columns: int, body: Callable[[Any, Any], Any]) -> None:
    """`body(row, column)` for every pair."""
    loop(0, rows, lambda row: loop(0, columns, lambda column: body(row, column)))
