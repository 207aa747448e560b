"""The definition of mean pooling: which token counts for which sequence, then the mean."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel.kernels.mean_pooling.inputs import Inputs, Outputs, Spec


def forward(
    inputs: Inputs, spec: Spec, round: Callable[[jax.Array], jax.Array] = lambda x: x
) -> Outputs:
    """The mean over the tokens of each sequence.

    `round` is applied to the inputs and to the result: what a narrow dtype cannot avoid.
    """
    x = round(inputs.x.astype(jnp.promote_types(inputs.x.dtype, jnp.float32)))
    belongs = _belongs(inputs)[..., None]  # [..., q, s, 1]
    sums = jnp.where(belongs, x[..., None, :, :], 0).sum(-2)
    out = sums / jnp.maximum(belongs.sum(-2), 1)
    return Outputs(round(out).astype(inputs.x.dtype))


def _belongs(inputs: Inputs) -> jax.Array:
    """Whether a token counts for a sequence, [..., q, s]."""
    token = jnp.arange(inputs.x.shape[-2])
    if inputs.cu_seqlens is not None:
        starts, ends = inputs.cu_seqlens[..., :-1, None], inputs.cu_seqlens[..., 1:, None]
        return (token >= starts) & (token < ends)
    if inputs.attention_mask is not None:
        return inputs.attention_mask[:, None]
    return jnp.ones((inputs.x.shape[0], 1, token.size), bool)
