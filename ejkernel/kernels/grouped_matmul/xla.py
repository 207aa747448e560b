"""Grouped matmul anywhere XLA runs: the rows of a group in tiles, groups without rows skipped.

The work is that of one matmul with all the rows, whatever the number of groups. Rows stand in the
order of their groups, sorted where they do not come so. A loop over the groups that have rows takes
each weight once; its rows go in large tiles as long as they fill one, the rest in smaller ones.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ejkernel.kernels.common import carry
from ejkernel.kernels.common.precision import precision
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Outputs, Spec, has_weight, local_ids
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device


def forward(inputs: Inputs, spec: Spec, params: GroupedMatmulConfig) -> tuple[Outputs, tuple[()]]:
    """The product of each row and its weight; the backward pass needs nothing of it."""
    lead = _lead(inputs)
    layout = _layout(inputs, lead)
    rows = layout.sort(_flat(inputs.inputs, lead))
    weight_axis = 2 if spec.transpose_rhs else 1
    out = _times_weights(rows, inputs.weights, weight_axis, layout, params.block_m)
    out = layout.restore(out).astype(spec.output_dtype(inputs)).reshape(*lead, -1, out.shape[-1])
    if inputs.existing_out is not None:
        out = jnp.where(has_weight(inputs)[..., None], out, inputs.existing_out.astype(out.dtype))
    return Outputs(out), ()


def backward(
    inputs: Inputs, _: tuple[()], d_outputs: Outputs, spec: Spec, params: GroupedMatmulConfig
) -> Inputs:
    """Gradients: the rows times the transposed weights, and for each weight a sum over its rows."""
    lead = _lead(inputs, d_outputs)
    layout = _layout(inputs, lead)
    rows, d_out = (layout.sort(_flat(x, lead)) for x in (inputs.inputs, d_outputs.out))
    weight_axis = 1 if spec.transpose_rhs else 2
    d_rows = _times_weights(d_out, inputs.weights, weight_axis, layout, params.block_m)
    pair = (d_out, rows) if spec.transpose_rhs else (rows, d_out)
    d_weights = _rows_times_rows(*pair, layout, params.block_m)
    d_existing = None
    if inputs.existing_out is not None:
        d_existing = jnp.where(has_weight(inputs)[..., None], 0, d_outputs.out)
        d_existing = d_existing.astype(inputs.existing_out.dtype)
    return type(inputs)(
        layout.restore(d_rows).astype(inputs.inputs.dtype).reshape(*lead, -1, d_rows.shape[-1]),
        d_weights.astype(inputs.weights.dtype),
        existing_out=d_existing,
    )


class _Layout(NamedTuple):
    """The rows of weight `e` stand from `starts[e]` to `ends[e]`; those without a weight last."""

    starts: Int[Array, "e"]
    ends: Int[Array, "e"]
    order: Int[Array, "m"] | None  # the row at each place; None: they come in this order
    places: Int[Array, "m"] | None  # the place of each row

    def sort(self, rows: Float[Array, "m c"]) -> Float[Array, "m c"]:
        if self.order is None:
            return rows
        return rows.at[self.order].get(mode="promise_in_bounds", unique_indices=True)

    def restore(self, rows: Float[Array, "m c"]) -> Float[Array, "m c"]:
        if self.places is None:
            return rows
        return rows.at[self.places].get(mode="promise_in_bounds", unique_indices=True)


def _lead(inputs: Inputs, d_outputs: Outputs | None = None) -> tuple[int, ...]:
    """The batch axis of calls that were joined, () for one call."""
    matrices = (inputs.inputs, inputs.existing_out, None if d_outputs is None else d_outputs.out)
    vectors = (inputs.group_ids, inputs.group_sizes)
    leads = [x.shape[:-2] for x in matrices if x is not None]
    return jnp.broadcast_shapes(*leads, *(x.shape[:-1] for x in vectors if x is not None))


def _flat(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """All rows of all joined calls, [m, columns]."""
    if not lead:
        return x
    return jnp.broadcast_to(x, (*lead, *x.shape[-2:])).reshape(-1, x.shape[-1])


def _layout(inputs: Inputs, lead: tuple[int, ...]) -> _Layout:
    rows, weights = inputs.inputs.shape[-2], inputs.weights.shape[0]
    if not lead and inputs.group_sizes is not None:
        return _Layout(*_ranges(inputs, rows), None, None)
    local = jnp.broadcast_to(local_ids(inputs), (*lead, rows)).reshape(-1)
    index = lax.iota(jnp.int32, local.shape[0])
    sorted_ids, order = lax.sort((local, index), num_keys=1)
    own = lax.iota(jnp.int32, weights)
    starts, ends = (
        jnp.searchsorted(sorted_ids, own, side=side).astype(jnp.int32) for side in ("left", "right")
    )
    places = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    return _Layout(starts, ends, order, places)


def _ranges(inputs: Inputs, rows: int) -> tuple[jax.Array, jax.Array]:
    """Where the rows of each weight start and end, from the sizes of all groups."""
    sizes = jnp.asarray(inputs.group_sizes)
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    if inputs.groups is None:
        return starts, ends
    groups = jnp.asarray(inputs.groups)
    there = (groups >= 0) & (groups < sizes.shape[0])
    groups = jnp.where(there, groups, 0)
    return jnp.where(there, starts[groups], 0), jnp.where(there, ends[groups], 0)


def _times_weights(
    rows: Float[Array, "m c"],
    weights: Float[Array, "e _ _"],
    weight_axis: int,
    layout: _Layout,
    block: int,
) -> Float[Array, "m d"]:
    """Each row times its weight, contracted with this axis of it; 0 for rows without a weight."""
    dtype = jnp.promote_types(jnp.promote_types(rows.dtype, weights.dtype), jnp.float32)
    total, columns = rows.shape[0], weights.shape[3 - weight_axis]
    sizes = _tile_sizes(block, total)

    def group(e: Any, out: jax.Array) -> jax.Array:
        weight = lax.dynamic_index_in_dim(weights, e, keepdims=False)

        def tile(start: Any, end: Any, size: int, out: jax.Array) -> jax.Array:
            at, inside = _window(start, end, size, total)
            part = lax.dynamic_slice_in_dim(rows, at, size)
            products = _dot(part, weight, (1, weight_axis - 1), dtype)
            before = lax.dynamic_slice_in_dim(out, at, size)
            products = jnp.where(inside, products, before)
            return lax.dynamic_update_slice_in_dim(out, products, at, axis=0)

        return _over_tiles(layout.starts[e], layout.ends[e], sizes, tile, out)

    out = carry.zeros((total, columns), dtype, rows, weights, layout)
    return _over_groups(layout, group, out)


def _rows_times_rows(
    left: Float[Array, "m c"], right: Float[Array, "m d"], layout: _Layout, block: int
) -> Float[Array, "e c d"]:
    """For each weight the sum over its rows of `left[r] right[r]^T`; 0 for a group of no rows."""
    dtype = jnp.promote_types(jnp.promote_types(left.dtype, right.dtype), jnp.float32)
    total, shape = left.shape[0], (left.shape[1], right.shape[1])
    # Every tile adds a whole matrix, so that many small ones cost more than a half empty one.
    sizes = _tile_sizes(block, total)[:2]
    zeros = carry.zeros(shape, dtype, left, right, layout)

    def group(e: Any, out: jax.Array) -> jax.Array:
        def tile(start: Any, end: Any, size: int, sum_so_far: jax.Array) -> jax.Array:
            at, inside = _window(start, end, size, total)
            one, other = (lax.dynamic_slice_in_dim(x, at, size) for x in (left, right))
            # Both: what stands outside may be NaN, and 0 times NaN is not 0.
            one, other = jnp.where(inside, one, 0), jnp.where(inside, other, 0)
            return sum_so_far + _dot(one, other, (0, 0), dtype)

        matrix = _over_tiles(layout.starts[e], layout.ends[e], sizes, tile, zeros)
        return lax.dynamic_update_index_in_dim(out, matrix, e, axis=0)

    out = carry.zeros((layout.starts.shape[0], *shape), dtype, left, right, layout)
    return _over_groups(layout, group, out)


def _tile_sizes(block: int, rows: int) -> tuple[int, ...]:
    """Rows of the tiles, largest first: a sixteenth of the largest is the most that one wastes.

    A tile of all rows would be the same in every step, and XLA would compute it for every group.
    """
    sizes = [max(1, block // part) for part in (1, 4, 16)]
    return tuple(dict.fromkeys(size for size in sizes if size < rows)) or (rows,)


def _over_groups(layout: _Layout, group: Callable[[Any, Any], Any], state: Any) -> Any:
    """`state = group(e, state)` for every weight that has rows."""
    busy = layout.ends > layout.starts
    chosen = jnp.nonzero(busy, size=busy.shape[0], fill_value=0)[0].astype(jnp.int32)
    count = busy.sum(dtype=jnp.int32)
    return lax.fori_loop(jnp.int32(0), count, lambda i, state: group(chosen[i], state), state)


def _over_tiles(
    start: Any, end: Any, sizes: tuple[int, ...], tile: Callable[..., Any], state: Any
) -> Any:
    """`state = tile(start, end, size, state)` over the rows from start to end, largest first."""
    for size in sizes:
        left = end - start
        count = -(-left // size) if size == sizes[-1] else left // size

        def step(i: Any, state: Any, start: Any = start, size: int = size) -> Any:
            return tile(start + i * size, end, size, state)

        state = lax.fori_loop(jnp.int32(0), count, step, state)
        start = start + count * size
    return state


def _window(start: Any, end: Any, size: int, total: int) -> tuple[Any, Bool[Array, "s 1"]]:
    """Where to cut `size` rows that hold those from start, and which of them lie before end."""
    at = jnp.minimum(start, total - size)
    index = at + lax.iota(jnp.int32, size)
    return at, ((index >= start) & (index < end))[:, None]


def _dot(left: jax.Array, right: jax.Array, axes: tuple[int, int], dtype: Any) -> jax.Array:
    """Contract one axis of each, accumulated in `dtype`, exact unless the user asked for less."""
    if left.dtype != right.dtype:
        left, right = left.astype(dtype), right.astype(dtype)
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision(), dtype)


def _heuristic(inputs: Inputs, spec: Spec, device: Device) -> GroupedMatmulConfig:
    """Larger tiles for more rows in a group."""
    matrix = inputs.inputs.shape
    rows = matrix[-2] * (matrix[0] if len(matrix) == 3 else 1) / max(1, inputs.weights.shape[0])
    block = next((size for most, size in ((2, 16), (32, 64), (512, 128)) if rows <= most), 256)
    return GroupedMatmulConfig(block_m=block, platform="xla")


def _candidates(inputs: Inputs, spec: Spec, device: Device) -> list[GroupedMatmulConfig]:
    return [GroupedMatmulConfig(block_m=size, platform="xla") for size in (16, 64, 128, 256)]


IMPLEMENTATION = Implementation(
    forward=Pass(run=forward, heuristic=_heuristic, candidates=_candidates),
    backward=Pass(run=backward, heuristic=_heuristic, candidates=_candidates),
)
