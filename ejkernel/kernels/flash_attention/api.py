"""The call: what it takes, what it means, how it becomes `Inputs` and `Spec`."""

import dataclasses
from typing import ClassVar, Final, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import (
    check_attention_shapes,
    specs_with_batch_axis,
    with_batch_axis,
)
from ejkernel.kernels.common.attention import (
    bias_of_rank_four,
    bound_of_logits,
    dropout_seed,
    scale_of_logits,
    sinks_per_head,
)
from ejkernel.kernels.common.masking import Extent, attention_rule
from ejkernel.kernels.flash_attention import OP
from ejkernel.kernels.flash_attention.config import FlashAttentionConfig
from ejkernel.kernels.flash_attention.inputs import Dropout, Inputs, Spec
from ejkernel.ops import executor
from ejkernel.ops.executor import Request
from ejkernel.ops.implementation import Op
from ejkernel.ops.module import BoundFunction, Module, operation
from ejkernel.types.arguments import SlidingWindow
from ejkernel.types.mask import MaskInfo


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int | ArrayLike = 0,
    sliding_window: SlidingWindow | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | ArrayLike | None = None,
    return_lse: Literal[False] = False,
    platform: str | None = None,
    cfg: FlashAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array: ...


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int | ArrayLike = 0,
    sliding_window: SlidingWindow | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | ArrayLike | None = None,
    return_lse: Literal[True],
    platform: str | None = None,
    cfg: FlashAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@operation
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int | ArrayLike = 0,
    sliding_window: SlidingWindow | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | ArrayLike | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: FlashAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact softmax attention whose memory is linear in the sequence length.

    For each query row, over the keys it may see,

        logits = soft_cap(softmax_scale * query @ key.T + bias)
        output = dropout(exp(logits) / (sum(exp(logits)) + sum(exp(softmax_aux)))) @ value

    with `soft_cap(x) = logits_soft_cap * tanh(x / logits_soft_cap)`. A row that sees nothing gives
    exactly 0. Query head `i` uses key head `i // (heads // kv_heads)`.

    Args:
        query: `[batch, queries, heads, head_dim]`; all arrays and results of a call may also come
            without the batch.
        key: `[batch, keys, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
        value: `[batch, keys, kv_heads, value_dim]`.
        bias: added to the scaled logits; broadcastable to `[batch, heads, queries, keys]`.
        cum_seqlens_q: `[0, l1, l1 + l2, ...]`, sequences packed into one row. A token sees its own
            sequence only; causal and window count positions within it.
        cum_seqlens_k: the same for the keys, by default `cum_seqlens_q`.
        softmax_aux: attention sinks, `[sinks]` for all heads or `[heads, sinks]`.
        mask_info: a `MaskInfo`; its batch may be 1.
        attention_mask: boolean or integer, True (or 1) where a key may be seen: `[batch, keys]`,
            `[batch, queries, keys]` or `[batch, heads, queries, keys]`.
        softmax_scale: by default `head_dim ** -0.5`.
        causal: query `q` sees keys `k <= q + causal_offset`.
        causal_offset: a number, or one per batch row (packed: one per sequence). For queries at the
            end of the keys pass `keys - queries`.
        sliding_window: `w` or `(left, right)`: `-left <= k - q <= right`. Either may be traced, as
            where the layers of a `jax.lax.scan` differ in their windows.
        logits_soft_cap: bound of the logits.
        dropout_prob: probability with which a weight is dropped, in [0, 1).
        dropout_seed: an integer or a `jax.random.key`, needed for dropout; the bits depend on it
            and on (batch, head, query, key) alone, not on platform, blocks or sharding.
        return_lse: also return the log-sum-exp.
        platform: "xla", "pallas", "triton", "cuda", or None for the best that supports the call.
        cfg: blocks and launch parameters; by default chosen for the call.
        mesh: run under `shard_map` over this mesh.
        in_specs: with `mesh`, the specs of query, key and value; the others follow from them.
        out_specs: the spec of the output; it follows from `in_specs`.

    Returns:
        The output `[batch, queries, heads, value_dim]` in the dtype of the query. With
        `return_lse` a pair of it and the natural logarithm of the sum of exponentials,
        `[batch, heads, queries]` in float32 (float64 for float64 inputs): of the visible keys,
        without the sinks, -inf for a row that sees nothing. Gradients flow through both.

    Raises:
        ValueError: the arguments do not fit each other.
        UnsupportedError: the requested platform does not support the call.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import flash_attention
    >>> x = jnp.ones((2, 128, 8, 64))
    >>> flash_attention(x, x, x, causal=True).shape
    (2, 128, 8, 64)
    """
    request = Request(platform, cfg, mesh, in_specs, out_specs)
    return attend(
        OP,
        Operands(query, key, value, bias, softmax_aux, cum_seqlens_q, cum_seqlens_k),
        MaskArguments(mask_info, attention_mask, causal, causal_offset, sliding_window),
        SoftmaxArguments(softmax_scale, logits_soft_cap, dropout_prob, dropout_seed),
        request,
        return_lse,
    )


class Operands(NamedTuple):
    """The arrays of a call, as the caller gave them."""

    query: ArrayLike
    key: ArrayLike
    value: ArrayLike
    bias: ArrayLike | None
    softmax_aux: ArrayLike | None
    cum_seqlens_q: ArrayLike | None
    cum_seqlens_k: ArrayLike | None


class MaskArguments(NamedTuple):
    """Which keys a query sees, as the caller gave it."""

    mask_info: MaskInfo | None
    attention_mask: ArrayLike | None
    causal: bool
    causal_offset: int | ArrayLike
    sliding_window: SlidingWindow | None


class SoftmaxArguments(NamedTuple):
    """What becomes of the logits and the weights, as the caller gave it."""

    softmax_scale: float | None
    logits_soft_cap: float | None
    dropout_prob: float
    dropout_seed: int | ArrayLike | None
    broadcast_dropout: bool = False  # the same weights in all batch rows and heads


def attend(
    op: Op,
    operands: Operands,
    mask: MaskArguments,
    softmax: SoftmaxArguments,
    request: Request,
    return_lse: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Check the arguments of `op`, flash attention under one of its names, and run the call."""
    name = op.name
    query, key, value, bare = with_batch_axis(name, operands.query, operands.key, operands.value)
    if bare:
        request = dataclasses.replace(
            request,
            in_specs=specs_with_batch_axis(request.in_specs),
            out_specs=specs_with_batch_axis(request.out_specs),
        )
    check_attention_shapes(name, query, key, value)
    extent = Extent(query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    inputs = Inputs(
        query,
        key,
        value,
        bias=bias_of_rank_four(name, operands.bias, extent),
        sinks=sinks_per_head(name, operands.softmax_aux, extent.heads),
        mask=attention_rule(
            name,
            extent,
            **mask._asdict(),
            cum_seqlens_q=operands.cum_seqlens_q,
            cum_seqlens_k=operands.cum_seqlens_k,
            batched=not bare,
        ),
        dropout=_dropout(name, softmax, extent),
    )
    spec = Spec(
        softmax_scale=scale_of_logits(name, softmax.softmax_scale, query.shape[3]),
        logits_soft_cap=bound_of_logits(name, softmax.logits_soft_cap),
        dropout_prob=float(softmax.dropout_prob),
    )
    if 0 in (*extent, value.shape[3]):
        out = jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
        dtype = jnp.promote_types(query.dtype, jnp.float32)
        lse = jnp.full((extent.batch, extent.heads, extent.queries), -jnp.inf, dtype)
    else:
        out, lse = executor.run(op, inputs, spec, request)
    if bare:
        out, lse = out.reshape(out.shape[1:]), lse.reshape(lse.shape[1:])
    return (out, lse) if return_lse else out


def _dropout(op: str, softmax: SoftmaxArguments, extent: Extent) -> Dropout | None:
    seed = dropout_seed(op, softmax.dropout_prob, softmax.dropout_seed)
    if seed is None:
        return None
    rows, heads = (
        _indices(count, softmax.broadcast_dropout) for count in (extent.batch, extent.heads)
    )
    return Dropout(seed, rows, heads)


def _indices(count: int, shared: bool) -> jax.Array:
    """The indices that random bits depend on; all 0 where they are shared."""
    library = np if isinstance(count, int) else jnp  # a symbolic size is known to JAX alone
    index = library.zeros if shared else library.arange
    return jnp.asarray(index(count, dtype=np.int32))


class FlashAttention(Module):
    """Flash attention as an object; see `flash_attention`."""

    __call__: Final = BoundFunction(flash_attention)
    config: ClassVar[type[FlashAttentionConfig]] = FlashAttentionConfig
