"""Arguments that the softmax attentions share, in the form their kernels take."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import as_array, check_floating, static_number
from ejkernel.kernels.common.masking import Extent


def scale_of_logits(op: str, scale: object, head_dim: int) -> float:
    """The factor of the logits, by default one over the root of the head dim."""
    return head_dim**-0.5 if scale is None else static_number(op, "softmax_scale", scale)


def bound_of_logits(op: str, soft_cap: object) -> float | None:
    """The soft cap, a positive number if there is one; an infinite one is none."""
    if soft_cap is None:
        return None
    number = static_number(op, "logits_soft_cap", soft_cap)
    if not number > 0:
        raise ValueError(
            f"{op}: logits_soft_cap must be positive, got {soft_cap}; None is no soft cap."
        )
    return None if number == math.inf else number


def dropout_seed(op: str, probability: object, seed: ArrayLike | None) -> jax.Array | None:
    """The seed of a call with dropout, int32; None where nothing is dropped.

    Args:
        op: the name of the op.
        probability: what the caller gave as `dropout_prob`.
        seed: an integer, or a key of `jax.random`, typed or a legacy `uint32[2]`. Of integers the
            last 32 bits count, of a key 32 random bits.

    Raises:
        ValueError: if the probability is not in [0, 1), or is positive without a seed.
    """
    number = static_number(op, "dropout_prob", probability)
    if not 0.0 <= number < 1.0:
        raise ValueError(f"{op}: dropout_prob must be in [0, 1), got {probability}.")
    if number == 0.0:
        return None
    if seed is None:
        raise ValueError(
            f"{op}: dropout_prob={number} needs dropout_seed=, an integer or a jax.random.key, "
            "another one in each step."
        )
    if isinstance(seed, int | np.integer):
        return jnp.asarray(np.uint32(int(seed) & 0xFFFFFFFF).astype(np.int32))
    array = as_array(op, "dropout_seed", seed)
    if array.dtype == jnp.uint32 and array.shape == (2,):
        array = jax.random.wrap_key_data(array, impl="threefry2x32")
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) and not array.ndim:
        array = jax.random.bits(array, (), jnp.uint32)
    if array.ndim or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{op}: dropout_seed must be one integer or one jax.random.key, "
            f"got {array.dtype}{list(array.shape)}."
        )
    return array.astype(jnp.int32)


def bias_of_rank_four(op: str, bias: ArrayLike | None, extent: Extent) -> jax.Array | None:
    """The bias as [#b, #n, #t, #s], at its own shape."""
    if bias is None:
        return None
    bias = as_array(op, "bias", bias)
    check_floating(op, "bias", bias.dtype)
    shape = (1,) * (4 - bias.ndim) + bias.shape
    if (
        bias.ndim < 2
        or len(shape) != 4
        or any(size not in (1, full) for size, full in zip(shape, extent, strict=True))
    ):
        raise ValueError(
            f"{op}: bias must broadcast to [batch, heads, queries, keys] = {tuple(extent)}, "
            f"got {list(bias.shape)}."
        )
    return bias if bias.ndim == 4 else bias.reshape(shape)


def sinks_per_head(op: str, sinks: ArrayLike | None, heads: int) -> jax.Array | None:
    """The sinks as [1 or heads, sinks]."""
    if sinks is None:
        return None
    sinks = as_array(op, "softmax_aux", sinks)
    check_floating(op, "softmax_aux", sinks.dtype)
    if sinks.ndim not in (1, 2) or (sinks.ndim == 2 and sinks.shape[0] != heads) or sinks.size == 0:
        raise ValueError(
            f"{op}: softmax_aux must be [sinks] or [{heads}, sinks], got {list(sinks.shape)}."
        )
    return sinks[None] if sinks.ndim == 1 else sinks
