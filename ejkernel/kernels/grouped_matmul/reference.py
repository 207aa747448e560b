"""The definition of grouped matmul: fetch every row its weight, multiply."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel.kernels.grouped_matmul.inputs import Inputs, Outputs, Spec


def forward(
    inputs: Inputs, spec: Spec, round: Callable[[jax.Array], jax.Array] = lambda x: x
) -> Outputs:
    """`out[r] = inputs[r] @ weights[group of r]`.

    `round` is applied to the inputs and to the result of the matmul: what a narrow dtype cannot
    avoid.
    """
    dtype = jnp.promote_types(inputs.inputs.dtype, jnp.float32)
    rows, weights = (round(x.astype(dtype)) for x in inputs[:2])
    if spec.transpose_rhs:
        weights = jnp.swapaxes(weights, 1, 2)
    groups = jnp.arange(weights.shape[0]) if inputs.groups is None else jnp.asarray(inputs.groups)
    ids = _groups_of_rows(inputs)[..., None]
    belongs = (ids == groups) & (ids >= 0)  # [r, e]

    own = weights[jnp.argmax(belongs, axis=-1)]  # [r, k, n]
    products = round(jnp.einsum("...rk,...rkn->...rn", rows, own))
    existing = jnp.zeros_like(products)
    if inputs.existing_out is not None:
        existing = round(inputs.existing_out.astype(dtype))
    out = jnp.where(belongs.any(-1, keepdims=True), products, existing)
    return Outputs(out.astype(spec.preferred_element_type or inputs.inputs.dtype))


def _groups_of_rows(inputs: Inputs) -> jax.Array:
    """The group of each row; negative for a row of none."""
    if inputs.group_ids is not None:
        return inputs.group_ids
    sizes = jnp.asarray(inputs.group_sizes)
    ends = jnp.cumsum(sizes, axis=-1)[..., None, :]
    passed = (jnp.arange(inputs.inputs.shape[-2])[:, None] >= ends).sum(-1)
    return jnp.where(passed < sizes.shape[-1], passed, -1)
