"""The `gmm` kernel on TPU: each row times its weight, forward and for the gradient of the rows.

A grid step fetches a row tile and a block of one weight into VMEM, where they are multiplied in
units of up to 512 x 512 x 512. A tile that belongs to one group is computed in whole units. Of a
tile that groups share only the rows of the step's group are computed, in strips.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ejkernel import settings
from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.kernels.grouped_matmul.layout import GroupLayout
from ejkernel.kernels.grouped_matmul.pallas_tpu.block_ops import (
    UNIT,
    Condition,
    Part,
    accumulated,
    branch,
    dot,
    grid_loop,
    loop,
    pad_rows,
    part,
    strip_of,
    unit_of,
)
from ejkernel.kernels.grouped_matmul.pallas_tpu.configs import TpuTileConfig
from ejkernel.kernels.grouped_matmul.pallas_tpu.schedule import (
    is_first,
    schedule_rows,
    state_of,
    weight_of,
)
from ejkernel.ops.meshes import result_shape
from ejkernel.types.block_map import EMPTY, FULL


def gmm(
    rows: Float[Array, "m c"],
    weights: Float[Array, "e _ _"],
    axis: int,
    layout: GroupLayout,
    dtype: np.dtype,
    tiles: TpuTileConfig,
) -> Float[Array, "m d"]:
    """Each row times its weight, contracted with this axis of it; 0 for rows without a weight."""
    count, rows = rows.shape[0], pad_rows(rows)
    (total, k), n = rows.shape, weights.shape[3 - axis]
    schedule = schedule_rows(layout, total, tiles.block_m)
    k_blocks = -(-k // tiles.block_k)
    kernel = _ForwardKernel(axis, k, k_blocks, min(tiles.block_k, UNIT))

    def k_block(step: Index, k_index: Index, packed: Ref) -> Index:
        return 0 if k_blocks == 1 else jnp.where(state_of(packed, step) == EMPTY, 0, k_index)

    def rows_at(
        column: Index, step: Index, k_index: Index, tile: Ref, packed: Ref, source: Ref, *_: Ref
    ) -> tuple[Index, Index]:
        return source[step], k_block(step, k_index, packed)

    def weights_at(
        column: Index, step: Index, k_index: Index, tile: Ref, packed: Ref, *_: Ref
    ) -> tuple[Index, Index, Index]:
        k_index, weight = k_block(step, k_index, packed), weight_of(packed, step)
        return (weight, k_index, column) if axis == 1 else (weight, column, k_index)

    weight_block = (tiles.block_k, tiles.block_n) if axis == 1 else (tiles.block_n, tiles.block_k)
    operands = (*schedule.scalars(), rows, weights)
    return pl.pallas_call(
        kernel.run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(-(-n // tiles.block_n), schedule.count, k_blocks),
            in_specs=[
                pl.BlockSpec((tiles.block_m, tiles.block_k), rows_at),
                pl.BlockSpec((None, *weight_block), weights_at),
            ],
            out_specs=pl.BlockSpec(
                (tiles.block_m, tiles.block_n),
                lambda column, step, k_index, tile, *_: (tile[step], column),
            ),
            scratch_shapes=[pltpu.VMEM((tiles.block_m, tiles.block_n), jnp.float32)],
        ),
        out_shape=result_shape((total, n), dtype, *operands),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=tiles.vmem_bytes,
            disable_bounds_checks=True,  # the schedule names no block outside of the arrays
        ),
        interpret=settings.interpret(),
    )(*operands)[:count]


class _ForwardKernel(NamedTuple):
    """The kernel and its static sizes.

    Attributes:
        axis: the contracted axis of `weights` [e, ., .].
        k: the length of the sum.
        k_blocks: in how many blocks the grid cuts it.
        k_chunk: the length of one matmul within a block.
    """

    axis: int
    k: int
    k_blocks: int
    k_chunk: int

    def run(
        self,
        tile: Ref,
        packed: Ref,
        source: Ref,
        starts: Ref,
        ends: Ref,
        rows: Ref,
        weights: Ref,
        out: Ref,
        acc: Ref,
    ) -> None:
        step, k_index = pl.program_id(1), pl.program_id(2)
        last_block = self.k_blocks == 1 or k_index == self.k_blocks - 1
        height, width = out.shape
        unit_n = unit_of(width)
        # The last chunk, which may be shorter, is not in the loop: it is followed by the epilogue.
        chunks = -(-rows.shape[1] // self.k_chunk) - 1
        last_chunk = slice(chunks * self.k_chunk, rows.shape[1])
        started = chunks > 0 or (self.k_blocks > 1 and k_index > 0)

        def product(at: Part, columns: Part, depth: Part) -> jax.Array:
            a = rows[at, depth]
            b = weights[depth, columns] if self.axis == 1 else weights[columns, depth]
            if self.k != rows.shape[1] * self.k_blocks:
                a, b = self._masked(a, b, k_index * rows.shape[1] + depth.start)
            return dot(a, b, (1, self.axis - 1))

        def add(at: Part, columns: Part, depth: Part, started: Condition) -> None:
            acc[at, columns] = accumulated(acc, (at, columns), started, product(at, columns, depth))

        def add_chunks(at: Part, columns: Part) -> None:
            def chunk(i: Index) -> None:
                add(
                    at,
                    columns,
                    part(i, self.k_chunk),
                    i > 0 if self.k_blocks == 1 else (k_index > 0) | (i > 0),
                )

            loop(0, chunks, chunk)

        def full_tile() -> None:
            def unit(row: Index, column: Index) -> None:
                at, columns = part(row, unit_of(height)), part(column, unit_n)
                add_chunks(at, columns)

                def epilogue() -> None:
                    total = accumulated(
                        acc, (at, columns), started, product(at, columns, last_chunk)
                    )
                    out[at, columns] = total.astype(out.dtype)

                branch(last_block, epilogue, lambda: add(at, columns, last_chunk, started))

            grid_loop(height // unit_of(height), width // unit_n, unit)

        def partial_tile() -> None:
            @pl.when(is_first(packed, step) & (k_index == 0))
            def _():
                # Rows without a group stay 0; those of the groups are written by their steps.
                out[...] = jnp.zeros_like(out)

            weight, top = weight_of(packed, step), tile[step] * height
            low, high = jnp.maximum(starts[weight] - top, 0), ends[weight] - top
            strip = strip_of(height)

            def unit(row: Index, column: Index) -> None:
                at, columns = part(row, strip), part(column, unit_n)
                add_chunks(at, columns)
                add(at, columns, last_chunk, started)

                def epilogue() -> None:
                    index = row * strip + jax.lax.broadcasted_iota(jnp.int32, (strip, 1), 0)
                    inside = (index >= low) & (index < high)
                    total = acc[at, columns].astype(out.dtype)
                    out[at, columns] = jnp.where(inside, total, out[at, columns])

                branch(last_block, epilogue, lambda: None)

            strips = pl.cdiv(jnp.minimum(high, height), strip)
            loop(
                jax.lax.div(low, strip),
                strips,
                lambda row: loop(0, width // unit_n, lambda column: unit(row, column)),
            )

        branch(state_of(packed, step) == FULL, full_tile, partial_tile)

    def _masked(self, a: jax.Array, b: jax.Array, start: Index) -> tuple[jax.Array, jax.Array]:
        """Both with 0 past the end of the sum: there may be NaN, and 0 times NaN is not 0."""
        inside = lambda shape, axis: (
            start + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < self.k
        )
        size = a.shape[1]
        shape = (size, 1) if self.axis == 1 else (1, size)
        return (
            jnp.where(inside((1, size), 1), a, jnp.zeros_like(a)),
            jnp.where(inside(shape, self.axis - 1), b, jnp.zeros_like(b)),
        )
