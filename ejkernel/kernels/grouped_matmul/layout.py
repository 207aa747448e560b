"""Rows in the order of their groups: what every kernel of grouped matmul starts from."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ejkernel.kernels.grouped_matmul.inputs import Inputs, Outputs, Spec, has_weight, local_ids


class Layout(NamedTuple):
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


def sorted_forward(inputs: Inputs, spec: Spec, times_weights: Callable[..., jax.Array]) -> Outputs:
    """The call, given a product of sorted rows and weights.

    `times_weights(rows, weights, axis, layout, dtype)` contracts each row with this axis of its
    weight and gives 0 for rows without one.
    """
    lead = _lead(inputs)
    layout = _layout(inputs, lead)
    rows, dtype = layout.sort(_flat(inputs.inputs, lead)), spec.output_dtype(inputs)
    axis = 2 if spec.transpose_rhs else 1
    out = layout.restore(times_weights(rows, inputs.weights, axis, layout, dtype))
    out = out.reshape(*lead, -1, out.shape[-1])
    if inputs.existing_out is not None:
        out = jnp.where(has_weight(inputs)[..., None], out, inputs.existing_out.astype(out.dtype))
    return Outputs(out)


def sorted_backward(
    inputs: Inputs,
    d_outputs: Outputs,
    spec: Spec,
    times_weights: Callable[..., jax.Array],
    rows_times_rows: Callable[..., jax.Array],
) -> Inputs:
    """The gradients of a call, given both products.

    `rows_times_rows(left, right, layout, dtype)` sums for each weight `left[r] right[r]^T` over its
    rows.
    """
    lead = _lead(inputs, d_outputs)
    layout = _layout(inputs, lead)
    rows, d_out = (layout.sort(_flat(x, lead)) for x in (inputs.inputs, d_outputs.out))
    axis = 1 if spec.transpose_rhs else 2
    d_rows = times_weights(d_out, inputs.weights, axis, layout, inputs.inputs.dtype)
    pair = (d_out, rows) if spec.transpose_rhs else (rows, d_out)
    d_weights = rows_times_rows(*pair, layout, inputs.weights.dtype)
    d_existing = None
    if inputs.existing_out is not None:
        d_existing = jnp.where(has_weight(inputs)[..., None], 0, d_outputs.out)
        d_existing = d_existing.astype(inputs.existing_out.dtype)
    return type(inputs)(
        layout.restore(d_rows).reshape(*lead, -1, d_rows.shape[-1]),
        d_weights,
        existing_out=d_existing,
    )


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


def _layout(inputs: Inputs, lead: tuple[int, ...]) -> Layout:
    rows, weights = inputs.inputs.shape[-2], inputs.weights.shape[0]
    if not lead and inputs.group_sizes is not None:
        return Layout(*_ranges(inputs, rows), None, None)
    local = jnp.broadcast_to(local_ids(inputs), (*lead, rows)).reshape(-1)
    index = lax.iota(jnp.int32, local.shape[0])
    sorted_ids, order = lax.sort((local, index), num_keys=1)
    own = lax.iota(jnp.int32, weights)
    starts, ends = (
        jnp.searchsorted(sorted_ids, own, side=side).astype(jnp.int32) for side in ("left", "right")
    )
    places = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    return Layout(starts, ends, order, places)


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
