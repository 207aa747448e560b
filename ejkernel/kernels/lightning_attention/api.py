"""The call: gated linear attention whose only decay is one for each head."""

import operator
from typing import ClassVar, Final, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import as_array, integer_array, known_values
from ejkernel.kernels.gla_attention.api import Recurrence, recur
from ejkernel.kernels.lightning_attention import OP
from ejkernel.kernels.lightning_attention.config import LightningAttentionConfig
from ejkernel.ops.executor import Request
from ejkernel.ops.module import BoundFunction, Module, operation

_NAME = "lightning_attention"


@overload
def lightning_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    decay: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    *,
    g_gamma: ArrayLike | None = None,
    layer_idx: int | ArrayLike | None = None,
    num_layers: int | None = None,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: Literal[False] = False,
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: LightningAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array: ...


@overload
def lightning_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    decay: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    *,
    g_gamma: ArrayLike | None = None,
    layer_idx: int | ArrayLike | None = None,
    num_layers: int | None = None,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: Literal[True],
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: LightningAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@operation
def lightning_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    decay: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    *,
    g_gamma: ArrayLike | None = None,
    layer_idx: int | ArrayLike | None = None,
    num_layers: int | None = None,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: LightningAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Linear attention in which each key head has a fixed decay rate.

        state[t] = decay * state[t - 1] + key[t] value[t]^T
        output[t] = softmax_scale * query[t]^T state[t]

    The decay is given as `decay`, as its logarithm `g_gamma`, or by the layer: key head `i` of `k`
    in layer `layer_idx` of `num_layers` has

        log(decay) = -8 / k * (1 - layer_idx / num_layers) * i

    so that deeper layers remember longer. Without any of the three it is that of layer 0.

    Args:
        query: `[batch, length, heads, head_dim]`; all arrays and results of a call may also come
            without the batch.
        key: `[batch, length, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
        value: `[batch, length, kv_heads, value_dim]`.
        decay: the factor in (0, 1] by which a state decays from token to token: a number,
            `[kv_heads]` or `[batch, kv_heads]`.
        initial_state: the state before the first token, `[batch, kv_heads, head_dim, value_dim]`
            (packed: `[sequences, ...]`); by default 0.
        cu_seqlens: `[0, l1, l1 + l2, ...]`, sequences packed into one row, each with a state of its
            own. Tokens past the last give 0.
        g_gamma: the logarithm of the decay, in the shapes of `decay`.
        layer_idx: the number of the layer, from 0; may be traced.
        num_layers: how many layers there are.
        softmax_scale: by default `head_dim ** -0.5`.
        reverse: run from the last token to the first.
        return_state: also return the state after the last token (with `reverse`: the first).
        axis_name: the mesh axis over which the sequence is split. In a `shard_map` over it, arrays
            of tokens are this device's shard, and `cu_seqlens` are those of the whole sequences.
            Elsewhere all are whole, and it is an axis of `mesh`, `jax.set_mesh` or `with mesh:`.
        platform: "xla", "pallas", "triton", or None for the best that supports the call.
        cfg: blocks and launch parameters; by default chosen for the call.
        mesh: run under `shard_map` over this mesh; batch and heads may be split, and with
            `axis_name` the sequence.
        in_specs: with `mesh`, the specs of query, key and value; the others follow from them.
        out_specs: the spec of the output; it follows from `in_specs`.

    Returns:
        The output `[batch, length, heads, value_dim]` in the dtype of the query. With
        `return_state` a pair of it and the state, shaped like `initial_state`, in float32 (float64
        for float64 inputs). Gradients flow through both, also to `decay` and `g_gamma`.

    Raises:
        ValueError: the arguments do not fit each other, or a decay lies outside (0, 1].
        UnsupportedError: the requested platform does not support the call.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import lightning_attention
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> lightning_attention(x, x, x, decay=0.5).ravel().tolist()
    [1.0, 1.5, 1.75]
    """
    given = [
        name
        for name, x in (("decay", decay), ("g_gamma", g_gamma), ("layer_idx", layer_idx))
        if x is not None
    ]
    if len(given) > 1:
        raise ValueError(
            f"{_NAME}: give one of decay, g_gamma and layer_idx, got {' and '.join(given)}."
        )
    key = as_array(_NAME, "key", key)
    if decay is not None:
        g_gamma = _logarithm(decay)
    elif g_gamma is None:
        g_gamma = _of_layer(layer_idx, num_layers, key.shape[-2] if key.ndim > 1 else 1)
    if num_layers is not None and layer_idx is None:
        raise ValueError(f"{_NAME}: num_layers needs layer_idx.")
    out, state = recur(
        OP,
        query,
        key,
        value,
        Recurrence(
            g_gamma=g_gamma,
            state=initial_state,
            cu_seqlens=cu_seqlens,
            softmax_scale=softmax_scale,
            reverse=reverse,
        ),
        Request(platform, cfg, mesh, in_specs, out_specs, axis_name=axis_name),
    )
    return (out, state()) if return_state else out


def _logarithm(decay: ArrayLike) -> jax.Array:
    """The logarithms of factors in (0, 1]."""
    values, decay = known_values(decay), as_array(_NAME, "decay", decay)
    if jnp.issubdtype(decay.dtype, jnp.complexfloating):
        raise ValueError(f"{_NAME}: decay must be real, got {decay.dtype}.")
    if not jnp.issubdtype(decay.dtype, jnp.floating):
        decay = decay.astype(jnp.float32)
    if values is not None and not ((values > 0) & (values <= 1)).all():
        raise ValueError(
            f"{_NAME}: decay must be a factor in (0, 1], got {values.tolist()}; for its logarithm "
            "there is g_gamma."
        )
    return jnp.log(decay)


def _of_layer(layer: int | ArrayLike | None, layers: int | None, heads: int) -> jax.Array:
    """The log decay of each head in a layer."""
    if layer is None:
        layer, layers = 0, 1
    elif layers is None:
        raise ValueError(f"{_NAME}: layer_idx needs num_layers.")
    try:
        layers = operator.index(layers)
    except (TypeError, jax.errors.TracerIntegerConversionError):
        raise ValueError(f"{_NAME}: num_layers must be an int, got {layers!r}.") from None
    known = isinstance(layer, int | np.integer)
    index = np.asarray(int(layer)) if known else integer_array(_NAME, "layer_idx", layer)
    values = known_values(layer)
    if index.ndim or not jnp.issubdtype(index.dtype, jnp.integer):
        raise ValueError(f"{_NAME}: layer_idx must be one int, got {layer!r}.")
    if layers < 1 or (values is not None and not 0 <= values < layers):
        raise ValueError(f"{_NAME}: layer_idx must lie within the layers, got {layer} of {layers}.")
    # By NumPy where the layer is known; a traced one makes it a part of the program.
    return jnp.asarray(-8.0 / heads * (1.0 - index / layers) * np.arange(heads, dtype=np.float32))


class LightningAttention(Module):
    """Lightning attention as an object; see `lightning_attention`."""

    __call__: Final = BoundFunction(lightning_attention)
    config: ClassVar[type[LightningAttentionConfig]] = LightningAttentionConfig
