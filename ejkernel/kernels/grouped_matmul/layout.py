"""Rows sorted by group, and the passes of grouped matmul in terms of two matmuls on sorted rows.

`gmm`, the grouped matmul, multiplies each row by the weight of its group. `tgmm`, the transposed
grouped matmul, sums for each weight the outer products of the rows of its group. The forward pass
is one `gmm`. The backward pass is one `gmm` for the rows and one `tgmm` for the weights.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ejkernel.kernels.grouped_matmul.inputs import Inputs, Outputs, Spec, has_weight, local_ids


class GroupLayout(NamedTuple):
    """Where the rows of each weight are, after sorting.

    Attributes:
        starts: the first row of each weight.
        ends: one past the last row of each weight.
        order: the row at each sorted position; None: the rows are sorted already.
        inverse_order: the sorted position of each row.
    """

    starts: Int[Array, "e"]
    ends: Int[Array, "e"]
    order: Int[Array, "m"] | None
    inverse_order: Int[Array, "m"] | None

    def sort(self, rows: Float[Array, "m c"]) -> Float[Array, "m c"]:
        if self.order is None:
            return rows
        return rows.at[self.order].get(mode="promise_in_bounds", unique_indices=True)

    def unsort(self, rows: Float[Array, "m c"]) -> Float[Array, "m c"]:
        if self.inverse_order is None:
            return rows
        return rows.at[self.inverse_order].get(mode="promise_in_bounds", unique_indices=True)


# gmm(rows [m, c], weights [e, ., .], contracted axis of a weight, layout, dtype) -> [m, d]; rows
# without a weight give 0.
Gmm = Callable[[jax.Array, jax.Array, int, GroupLayout, np.dtype], jax.Array]
# tgmm(left [m, c], right [m, d], layout, dtype) -> [e, c, d]; a weight without rows gives 0.
Tgmm = Callable[[jax.Array, jax.Array, GroupLayout, np.dtype], jax.Array]


def sorted_forward(inputs: Inputs, spec: Spec, gmm: Gmm) -> Outputs:
    """The forward pass, given a `gmm` of sorted rows."""
    batch = batch_shape(inputs)
    layout = _group_layout(inputs, batch)
    rows, dtype = layout.sort(flatten_rows(inputs.inputs, batch)), spec.output_dtype(inputs)
    axis = 2 if spec.transpose_rhs else 1
    out = layout.unsort(gmm(rows, inputs.weights, axis, layout, dtype))
    out = out.reshape(*batch, -1, out.shape[-1])
    if inputs.existing_out is not None:
        out = jnp.where(has_weight(inputs)[..., None], out, inputs.existing_out.astype(out.dtype))
    return Outputs(out)


def sorted_backward(inputs: Inputs, d_outputs: Outputs, spec: Spec, gmm: Gmm, tgmm: Tgmm) -> Inputs:
    """The backward pass, given a `gmm` and a `tgmm` of sorted rows."""
    batch = batch_shape(inputs, d_outputs)
    layout = _group_layout(inputs, batch)
    rows, d_out = (layout.sort(flatten_rows(x, batch)) for x in (inputs.inputs, d_outputs.out))
    axis = 1 if spec.transpose_rhs else 2
    d_rows = gmm(d_out, inputs.weights, axis, layout, inputs.inputs.dtype)
    left, right = (d_out, rows) if spec.transpose_rhs else (rows, d_out)
    d_weights = tgmm(left, right, layout, inputs.weights.dtype)
    d_existing = existing_gradient(inputs, d_outputs)
    return type(inputs)(
        layout.unsort(d_rows).reshape(*batch, -1, d_rows.shape[-1]),
        d_weights,
        existing_out=d_existing,
    )


def existing_gradient(inputs: Inputs, d_outputs: Outputs) -> Float[Array, "*b r n"] | None:
    """The gradient of `existing_out`: that of the rows without a weight."""
    if inputs.existing_out is None:
        return None
    d_existing = jnp.where(has_weight(inputs)[..., None], 0, d_outputs.out)
    return d_existing.astype(inputs.existing_out.dtype)


def batch_shape(inputs: Inputs, d_outputs: Outputs | None = None) -> tuple[int, ...]:
    """The batch axis of a call under vmap, () for a single call."""
    matrices = (inputs.inputs, inputs.existing_out, None if d_outputs is None else d_outputs.out)
    vectors = (inputs.group_ids, inputs.group_sizes)
    shapes = [x.shape[:-2] for x in matrices if x is not None]
    return jnp.broadcast_shapes(*shapes, *(x.shape[:-1] for x in vectors if x is not None))


def flatten_rows(x: jax.Array, batch: tuple[int, ...]) -> Float[Array, "m c"]:
    """The rows of all calls of a batch."""
    if not batch:
        return x
    return jnp.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(-1, x.shape[-1])


def _group_layout(inputs: Inputs, batch: tuple[int, ...]) -> GroupLayout:
    """Rows without a weight are sorted last, unless `group_sizes` puts them elsewhere."""
    rows, weights = inputs.inputs.shape[-2], inputs.weights.shape[0]
    if not batch and inputs.group_sizes is not None:
        return GroupLayout(*_ranges(inputs, rows), None, None)
    local = jnp.broadcast_to(local_ids(inputs), (*batch, rows)).reshape(-1)
    index = lax.iota(jnp.int32, local.shape[0])
    sorted_ids, order = lax.sort((local, index), num_keys=1)
    weight = lax.iota(jnp.int32, weights)
    starts, ends = (
        jnp.searchsorted(sorted_ids, weight, side=side).astype(jnp.int32)
        for side in ("left", "right")
    )
    inverse_order = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    return GroupLayout(starts, ends, order, inverse_order)


def _ranges(inputs: Inputs, rows: int) -> tuple[Int[Array, "e"], Int[Array, "e"]]:
    """Where the rows of each weight start and end, from the sizes of all groups."""
    sizes = jnp.asarray(inputs.group_sizes)
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    if inputs.groups is None:
        return starts, ends
    groups = jnp.asarray(inputs.groups)
    exists = (groups >= 0) & (groups < sizes.shape[0])
    groups = jnp.where(exists, groups, 0)
    return jnp.where(exists, starts[groups], 0), jnp.where(exists, ends[groups], 0)
