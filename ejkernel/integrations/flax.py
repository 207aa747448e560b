"""The `attention_fn` of Flax's attention modules, computed by `flash_attention`.

    nnx.MultiHeadAttention(..., attention_fn=ejkernel.integrations.flax.attention_fn)
    linen.MultiHeadDotProductAttention(..., attention_fn=ejkernel.integrations.flax.attention_fn)

Flax is not imported: its modules call this function with their own arguments.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention import OP
from ejkernel.kernels.flash_attention.api import (
    MaskArguments,
    Operands,
    SoftmaxArguments,
    attend,
)
from ejkernel.ops.executor import Request
from ejkernel.ops.module import operation

_NAME = "attention_fn"


@operation
def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    *,
    platform: str | None = None,
) -> jax.Array:
    """Dot-product attention with the arguments of `flax.nnx` and `flax.linen`.

    Softmax is computed in float32, whatever `force_fp32_for_softmax` says. Dropout draws other bits
    than Flax does, with the same probability. A row that sees no key gives 0, where Flax gives the
    mean of all values.

    Args:
        query: `[..., queries, heads, head_dim]`, any number of batch axes.
        key: `[..., keys, kv_heads, head_dim]`.
        value: `[..., keys, kv_heads, value_dim]`.
        bias: added to the logits, broadcastable to `[..., heads, queries, keys]`.
        mask: nonzero where a key may be seen, broadcastable to the same shape.
        broadcast_dropout: drop the same weights in all batch rows and heads.
        dropout_rng: the key that dropout draws from.
        dropout_rate: the probability with which a weight is dropped.
        deterministic: no dropout.
        dtype: of the computation; by default that of the arrays.
        precision: of float32 matmuls, a `jax.lax.Precision` or its name; by default full float32.
        module: attention weights are not computed, so there is nothing to sow: must be None.
        force_fp32_for_softmax: always so.
        einsum_dot_general: must be None, since the products are computed inside a kernel.
        qk_attn_weights_einsum: must be None.
        attn_weights_value_einsum: must be None.
        promote_dtype: brings query, key and value to one dtype.
        is_causal: query `q` sees keys `k <= q`.
        platform: as in `flash_attention`.

    Returns:
        The output `[..., queries, heads, value_dim]`.

    Raises:
        ValueError: the arguments do not fit each other.
        NotImplementedError: an argument asks for what a fused kernel cannot do.
    """
    _refuse("module (sow_weights=True)", module, "attention weights are never in memory")
    for name, einsum in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        _refuse(name, einsum, "the products are computed inside a kernel")
    query, key, value = _promoted((query, key, value), dtype, promote_dtype)
    batch = query.shape[:-3]
    if not query.ndim == key.ndim == value.ndim >= 3:
        raise ValueError(
            f"{_NAME}: query, key and value must have the same number of axes, at least 3, "
            f"got {query.shape}, {key.shape} and {value.shape}."
        )
    if not batch == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            f"{_NAME}: query, key and value must have the same batch axes, "
            f"got {query.shape}, {key.shape} and {value.shape}."
        )
    shape = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
    bias, mask = _rank_four("bias", bias, shape), _rank_four("mask", mask, shape)
    mask = None if mask is None else mask != 0
    rate = 0.0 if deterministic else dropout_rate

    def run(arrays: _Arrays) -> jax.Array:
        out = attend(
            OP,
            Operands(*arrays[:4], softmax_aux=None, cum_seqlens_q=None, cum_seqlens_k=None),
            MaskArguments(None, arrays.mask, is_causal, 0, None),
            SoftmaxArguments(None, None, rate, arrays.seed, broadcast_dropout),
            Request(platform),
            return_lse=False,
        )
        return cast(jax.Array, out)

    query, key, value = (x.reshape((math.prod(batch), *x.shape[-3:])) for x in (query, key, value))
    arrays = _Arrays(query, key, value, bias, mask, _seed(rate, dropout_rng))
    out = _at_precision(precision, run)(arrays)
    return out.reshape((*batch, *out.shape[1:]))


class _Arrays(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    seed: jax.Array | None


def _refuse(name: str, given: Any, why: str) -> None:
    if given is not None:
        raise NotImplementedError(f"{_NAME}: {name} is not supported: {why}.")


def _promoted(
    arrays: tuple[jax.Array, ...], dtype: Any, promote: Callable[..., Any] | None
) -> tuple[jax.Array, ...]:
    if promote is not None:
        return promote(arrays, dtype=dtype)
    if dtype is None:
        dtype = jnp.result_type(*arrays)
        dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32
    return tuple(jnp.asarray(x, dtype) for x in arrays)


def _rank_four(name: str, x: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """`x`, broadcastable to `[..., heads, queries, keys]`, with one batch axis."""
    if x is None:
        return None
    x, batch = jnp.asarray(x), shape[:-3]
    full = (1,) * (len(shape) - x.ndim) + x.shape
    if len(full) != len(shape) or any(
        size not in (1, whole) for size, whole in zip(full, shape, strict=True)
    ):
        raise ValueError(f"{_NAME}: {name} must be broadcastable to {shape}, got {x.shape}.")
    rows = math.prod(full[:-3])
    if rows not in (1, math.prod(batch)):
        x, rows = jnp.broadcast_to(x.reshape(full), (*batch, *full[-3:])), math.prod(batch)
    return x.reshape((rows, *full[-3:]))


def _seed(rate: float, rng: jax.Array | None) -> jax.Array | None:
    if rate == 0.0:
        return None
    if rng is None:
        raise ValueError(f"{_NAME}: dropout_rate={rate} needs dropout_rng= or deterministic=True.")
    return jax.random.bits(rng, (), "uint32")


def _at_precision(
    precision: Any, run: Callable[[_Arrays], jax.Array]
) -> Callable[[_Arrays], jax.Array]:
    """`run` with float32 matmuls of this precision, also where its gradient is computed."""
    if precision is None:
        return run
    if isinstance(precision, tuple):
        if len(set(precision)) > 1:
            raise NotImplementedError(
                f"{_NAME}: precision must be the same for both operands, got {precision}."
            )
        precision = precision[0]
    if isinstance(precision, jax.lax.Precision):
        precision = precision.name.lower()
    context = functools.partial(jax.default_matmul_precision, getattr(precision, "name", precision))

    @jax.custom_vjp
    def at_precision(arrays: _Arrays) -> jax.Array:
        with context():
            return run(arrays)

    def forward(arrays: _Arrays) -> tuple[jax.Array, Callable[..., Any]]:
        with context():
            return jax.vjp(run, arrays)

    def backward(vjp: Callable[..., Any], d_out: jax.Array) -> Any:
        with context():
            return vjp(d_out)

    at_precision.defvjp(forward, backward)
    return at_precision
