"""The `tgmm` kernel on TPU: for each weight the sum of the outer products of its rows.

The grid runs over blocks of the weight, then over row tiles. Tiles that belong to one group are
multiplied in whole units, tiles that groups share in strips with the other rows set to 0.
"""

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
    Condition,
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
    is_continued,
    is_last,
    schedule_rows,
    state_of,
    weight_of,
)
from ejkernel.ops.meshes import result_shape
from ejkernel.types.block_map import EMPTY, FULL


def tgmm(
    left: Float[Array, "m c"],
    right: Float[Array, "m d"],
    layout: GroupLayout,
    dtype: np.dtype,
    tiles: TpuTileConfig,
) -> Float[Array, "e c d"]:
    """For each weight the sum over its rows of `left[r] right[r]^T`; 0 for a group of no rows.

    The result has blocks of `tiles.block_k` by `tiles.block_n`.
    """
    left, right = pad_rows(left), pad_rows(right)
    total, shape = left.shape[0], (left.shape[1], right.shape[1])
    schedule = schedule_rows(layout, total, tiles.block_m, by_weight=True)
    block = (tiles.block_k, tiles.block_n)

    operands = (*schedule.scalars(), left, right)
    return pl.pallas_call(
        _weight_grad_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(-(-shape[0] // block[0]), -(-shape[1] // block[1]), schedule.count),
            in_specs=[
                pl.BlockSpec(
                    (tiles.block_m, block[0]),
                    lambda i, j, step, tile, packed, source, *_: (source[step], i),
                ),
                pl.BlockSpec(
                    (tiles.block_m, block[1]),
                    lambda i, j, step, tile, packed, source, *_: (source[step], j),
                ),
            ],
            out_specs=pl.BlockSpec(
                (None, *block),
                lambda i, j, step, tile, packed, *_: (weight_of(packed, step), i, j),
            ),
            scratch_shapes=[] if dtype == jnp.float32 else [pltpu.VMEM(block, jnp.float32)],
        ),
        out_shape=result_shape((layout.starts.shape[0], *shape), dtype, *operands),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tiles.vmem_bytes,
            disable_bounds_checks=True,  # the schedule names no block outside of the arrays
        ),
        interpret=settings.interpret(),
    )(*operands)


def _weight_grad_kernel(
    tile: Ref,
    packed: Ref,
    source: Ref,
    starts: Ref,
    ends: Ref,
    left: Ref,
    right: Ref,
    out: Ref,
    *scratch: Ref,
) -> None:
    acc = scratch[0] if scratch else out
    step = pl.program_id(2)
    weight, started = weight_of(packed, step), is_continued(packed, step)
    height, (unit_c, unit_d) = left.shape[0], map(unit_of, acc.shape)
    units = (acc.shape[0] // unit_c, acc.shape[1] // unit_d)

    def add(a: jax.Array, b: jax.Array, i: Index, j: Index, started: Condition) -> None:
        at = (part(i, unit_c), part(j, unit_d))
        acc[at] = accumulated(acc, at, started, dot(a, b, (0, 0)))

    def full_tile() -> None:
        depth = unit_of(height)

        def unit(i: Index, j: Index) -> None:
            def rows(row: Index) -> None:
                a, b = (
                    left[part(row, depth), part(i, unit_c)],
                    right[part(row, depth), part(j, unit_d)],
                )
                add(a, b, i, j, started | (row > 0))

            loop(0, height // depth, rows)

        grid_loop(*units, unit)

    def partial_tile() -> None:
        top, strip = tile[step] * height, strip_of(height)
        low, high = jnp.maximum(starts[weight] - top, 0), ends[weight] - top
        first = jax.lax.div(low, strip)

        @pl.when(state_of(packed, step) == EMPTY)
        def _():
            out[...] = jnp.zeros_like(out)

        def rows(row: Index) -> None:
            index = row * strip + jax.lax.broadcasted_iota(jnp.int32, (strip, 1), 0)
            inside = (index >= low) & (index < high)

            def unit(i: Index, j: Index) -> None:
                a, b = (
                    left[part(row, strip), part(i, unit_c)],
                    right[part(row, strip), part(j, unit_d)],
                )
                # Both operands: rows of other groups may hold NaN, and 0 times NaN is not 0.
                a = jnp.where(inside, a, jnp.zeros_like(a))
                b = jnp.where(inside, b, jnp.zeros_like(b))
                add(a, b, i, j, started | (row > first))

            grid_loop(*units, unit)

        loop(first, pl.cdiv(jnp.minimum(high, height), strip), rows)

    branch(state_of(packed, step) == FULL, full_tile, partial_tile)
    if not scratch:
        return

    @pl.when(is_last(packed, step) & (state_of(packed, step) != EMPTY))
    def _():
        out[...] = acc[...].astype(out.dtype)
