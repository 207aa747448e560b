"""Grouped matmul on any XLA backend: a loop over the groups that have rows, tile by tile.

The work is that of one matmul with all the rows, whatever the number of groups. Rows are sorted by
group. The loop reads each weight once. The rows of a group are cut into large tiles as long as they
fill one, and the remainder into smaller tiles.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from ejkernel.kernels.common import carry
from ejkernel.kernels.common.precision import precision
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Outputs, Spec, rows_per_weight
from ejkernel.kernels.grouped_matmul.layout import GroupLayout, sorted_backward, sorted_forward
from ejkernel.ops.implementation import ALL_FEATURES, Implementation, Pass
from ejkernel.ops.platform import Device


def forward(inputs: Inputs, spec: Spec, params: GroupedMatmulConfig) -> tuple[Outputs, tuple[()]]:
    """Each row times its weight; there are no residuals."""
    return sorted_forward(inputs, spec, functools.partial(_gmm, block=params.block_m)), ()


def backward(
    inputs: Inputs, _: tuple[()], d_outputs: Outputs, spec: Spec, params: GroupedMatmulConfig
) -> Inputs:
    """The gradients of rows, weights and `existing_out`."""
    return sorted_backward(
        inputs,
        d_outputs,
        spec,
        functools.partial(_gmm, block=params.block_m),
        functools.partial(_tgmm, block=params.block_m),
    )


def _gmm(
    rows: Float[Array, "m c"],
    weights: Float[Array, "e _ _"],
    weight_axis: int,
    layout: GroupLayout,
    out_dtype: np.dtype,
    block: int,
) -> Float[Array, "m d"]:
    """Each row times its weight, contracted with this axis of it; 0 for rows without a weight."""
    dtype = jnp.promote_types(jnp.promote_types(rows.dtype, weights.dtype), jnp.float32)
    total, columns = rows.shape[0], weights.shape[3 - weight_axis]
    sizes = _tile_sizes(block, total)

    def group(e: jax.Array, out: jax.Array) -> jax.Array:
        weight = lax.dynamic_index_in_dim(weights, e, keepdims=False)

        def tile(start: jax.Array, end: jax.Array, size: int, out: jax.Array) -> jax.Array:
            at, inside = _clamped_slice(start, end, size, total)
            part = lax.dynamic_slice_in_dim(rows, at, size)
            products = _dot(part, weight, (1, weight_axis - 1), dtype)
            before = lax.dynamic_slice_in_dim(out, at, size)
            products = jnp.where(inside, products, before)
            return lax.dynamic_update_slice_in_dim(out, products, at, axis=0)

        return _over_tiles(layout.starts[e], layout.ends[e], sizes, tile, out)

    out = carry.zeros((total, columns), dtype, rows, weights, layout)
    return _over_groups(layout, group, out).astype(out_dtype)


def _tgmm(
    left: Float[Array, "m c"],
    right: Float[Array, "m d"],
    layout: GroupLayout,
    out_dtype: np.dtype,
    block: int,
) -> Float[Array, "e c d"]:
    """For each weight the sum over its rows of `left[r] right[r]^T`; 0 for a group of no rows."""
    dtype = jnp.promote_types(jnp.promote_types(left.dtype, right.dtype), jnp.float32)
    total, shape = left.shape[0], (left.shape[1], right.shape[1])
    # Every tile adds a whole [c, d] matrix: many small tiles cost more than one half empty tile.
    sizes = _tile_sizes(block, total)[:2]
    zeros = carry.zeros(shape, dtype, left, right, layout)

    def group(e: jax.Array, out: jax.Array) -> jax.Array:
        def tile(start: jax.Array, end: jax.Array, size: int, acc: jax.Array) -> jax.Array:
            at, inside = _clamped_slice(start, end, size, total)
            a, b = (lax.dynamic_slice_in_dim(x, at, size) for x in (left, right))
            # Both operands: rows of other groups may hold NaN, and 0 times NaN is not 0.
            a, b = jnp.where(inside, a, 0), jnp.where(inside, b, 0)
            return acc + _dot(a, b, (0, 0), dtype)

        matrix = _over_tiles(layout.starts[e], layout.ends[e], sizes, tile, zeros)
        return lax.dynamic_update_index_in_dim(out, matrix, e, axis=0)

    out = carry.zeros((layout.starts.shape[0], *shape), dtype, left, right, layout)
    return _over_groups(layout, group, out).astype(out_dtype)


def _tile_sizes(block: int, rows: int) -> tuple[int, ...]:
    """Rows of the tiles, largest first: a sixteenth of the largest is the most that one wastes.

    A tile of all rows would be loop-invariant, and XLA would compute it for every group.
    """
    sizes = [max(1, block // part) for part in (1, 4, 16)]
    return tuple(dict.fromkeys(size for size in sizes if size < rows)) or (rows,)


def _over_groups(
    layout: GroupLayout, group: Callable[[jax.Array, jax.Array], jax.Array], state: jax.Array
) -> jax.Array:
    """`state = group(e, state)` for every weight that has rows."""
    busy = layout.ends > layout.starts
    chosen = jnp.nonzero(busy, size=busy.shape[0], fill_value=0)[0].astype(jnp.int32)
    count = busy.sum(dtype=jnp.int32)
    return lax.fori_loop(jnp.int32(0), count, lambda i, state: group(chosen[i], state), state)


def _over_tiles(
    start: jax.Array,
    end: jax.Array,
    sizes: tuple[int, ...],
    tile: Callable[[jax.Array, jax.Array, int, jax.Array], jax.Array],
    state: jax.Array,
) -> jax.Array:
    """`state = tile(start, end, size, state)` over the rows from start to end, largest first."""
    for size in sizes:
        left = end - start
        count = -(-left // size) if size == sizes[-1] else left // size

        def step(
            i: jax.Array, state: jax.Array, start: jax.Array = start, size: int = size
        ) -> jax.Array:
            return tile(start + i * size, end, size, state)

        state = lax.fori_loop(jnp.int32(0), count, step, state)
        start = start + count * size
    return state


def _clamped_slice(
    start: jax.Array, end: jax.Array, size: int, total: int
) -> tuple[jax.Array, Bool[Array, "s 1"]]:
    """Where a slice of `size` rows from `start` begins, moved back so that it stays inside.

    The second result says which of its rows are in [start, end).
    """
    at = jnp.minimum(start, total - size)
    index = at + lax.iota(jnp.int32, size)
    return at, ((index >= start) & (index < end))[:, None]


def _dot(left: jax.Array, right: jax.Array, axes: tuple[int, int], dtype: np.dtype) -> jax.Array:
    """Contract one axis of each, accumulated in `dtype`, exact unless the user asked for less."""
    if left.dtype != right.dtype:
        left, right = left.astype(dtype), right.astype(dtype)
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision(), dtype)


def _heuristic(inputs: Inputs, spec: Spec, device: Device) -> GroupedMatmulConfig:
    """Larger tiles for more rows in a group."""
    rows = rows_per_weight(inputs)
    block = next((size for most, size in ((2, 16), (32, 64), (512, 128)) if rows <= most), 256)
    return GroupedMatmulConfig(block_m=block, platform="xla")


def _candidates(inputs: Inputs, spec: Spec, device: Device) -> list[GroupedMatmulConfig]:
    return [GroupedMatmulConfig(block_m=size, platform="xla") for size in (16, 64, 128, 256)]


_OPTIONS = {"features": ALL_FEATURES, "heuristic": _heuristic, "candidates": _candidates}
IMPLEMENTATION = Implementation(
    forward=Pass(run=forward, **_OPTIONS), backward=Pass(run=backward, **_OPTIONS)
)
