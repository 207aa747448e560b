"""What a backward pass on Hopper knows of each query: its log-sum-exp and its delta."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.sinks import share_of_keys
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec


class RowStats(NamedTuple):
    """What the logits of a row share, each [b, n, t].

    With p a weight, sinks in its denominator, and w the part that these leave to the keys (1
    without sinks), d_logits = p * (d_weights + d_lse / w - delta).
    """

    lse: jax.Array  # to base 2; with `starts_with_lse` negative, and in units of the products
    offset: jax.Array  # d_lse / w - delta
    key_share: jax.Array  # w
    sees_a_key: jax.Array


def row_stats(inputs: Inputs, residuals: Outputs, d_outputs: Outputs, spec: Spec) -> RowStats:
    """The statistics of each row that a backward kernel needs."""
    lse, d_lse = residuals.lse, d_outputs.lse.astype(jnp.float32)
    products = residuals.out.astype(jnp.float32) * d_outputs.out.astype(jnp.float32)
    # Summed on its own: fused with what follows, XLA reads it five times as slowly.
    delta = jnp.swapaxes(lax.optimization_barrier(products.sum(-1)), 1, 2)
    sees_a_key = lse > -jnp.inf
    key_share, exponent = jnp.ones_like(lse), lse * LOG2_E
    if inputs.sinks is not None:
        key_share = jnp.maximum(share_of_keys(lse, inputs.sinks), 1e-30)  # a divisor
        exponent = exponent - jnp.log2(key_share)
        d_lse = jnp.where(sees_a_key, d_lse / key_share, 0.0)
    exponent = jnp.where(sees_a_key, exponent, jnp.inf)  # the weights of an empty row are 0
    if starts_with_lse(spec):
        exponent = exponent * (-1.0 / (spec.softmax_scale * LOG2_E))
    return RowStats(exponent, d_lse - delta, key_share, sees_a_key)


def starts_with_lse(spec: Spec) -> bool:
    """Whether accumulators of logits are initialised with the lse: not if a soft cap is between."""
    return spec.logits_soft_cap is None
