"""The call: gated linear attention that takes a state and gives one back."""

from typing import ClassVar, Final

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike

from ejkernel.kernels.gla_attention.api import Recurrence, recur
from ejkernel.kernels.recurrent_attention import OP
from ejkernel.kernels.recurrent_attention.config import RecurrentAttentionConfig
from ejkernel.ops.executor import Request
from ejkernel.ops.module import BoundFunction, Module, operation


@operation
def recurrent_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    gate: ArrayLike | None = None,
    g_gamma: ArrayLike | None = None,
    gv: ArrayLike | None = None,
    state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: RecurrentAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Linear attention that takes a state and returns the output and the new state.

        state[t] = exp(gate[t] + g_gamma) * state[t - 1] * exp(gv[t]) + key[t] value[t]^T
        output[t] = softmax_scale * query[t]^T state[t]

    with a state `[head_dim, value_dim]` for each key head: `gate` decays its rows, `gv` its
    columns, `g_gamma` all of it. All are logarithms of decays. A sequence that is fed in parts,
    each with the state that the one before gave back, gives what it gives in one piece.

    Args:
        query: `[batch, length, heads, head_dim]`; all arrays and results of a call may also come
            without the batch.
        key: `[batch, length, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
        value: `[batch, length, kv_heads, value_dim]`.
        gate: `[batch, length, kv_heads, head_dim]`, or `[batch, length, kv_heads]` for one that all
            rows of the state share; by default 0.
        g_gamma: a number, `[kv_heads]` or `[batch, kv_heads]`, the same for all tokens; by
            default 0.
        gv: `[batch, length, kv_heads, value_dim]`; by default 0.
        state: what the last call gave back, `[batch, kv_heads, head_dim, value_dim]` (packed:
            `[sequences, ...]`); None to begin with.
        cu_seqlens: `[0, l1, l1 + l2, ...]`, sequences packed into one row, each with a state of its
            own. Tokens past the last give 0.
        softmax_scale: by default `head_dim ** -0.5`.
        reverse: run from the last token to the first.
        axis_name: the mesh axis over which the sequence is split. In a `shard_map` over it, arrays
            of tokens are this device's shard, and `cu_seqlens` are those of the whole sequences.
            Elsewhere all are whole, and it is an axis of `mesh`, `jax.set_mesh` or `with mesh:`.
        platform: "xla", "pallas", "triton", or None for the best that supports the call.
        cfg: blocks and launch parameters; by default chosen for the call.
        mesh: run under `shard_map` over this mesh; batch and heads may be split, and with
            `axis_name` the sequence.
        in_specs: with `mesh`, the specs of query, key and value, and if wanted that of gate; the
            others follow from them.
        out_specs: the spec of the output; it follows from `in_specs`.

    Returns:
        The output `[batch, length, heads, value_dim]` in the dtype of the query, and the new state
        in float32 (float64 for float64 inputs). Gradients flow through both.

    Raises:
        ValueError: the arguments do not fit each other.
        UnsupportedError: the requested platform does not support the call.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import recurrent_attention
    >>> token = jnp.ones((2, 1, 8, 64))
    >>> output, state = recurrent_attention(token, token, token)
    >>> output, state = recurrent_attention(token, token, token, state=state)
    >>> output.shape, state.shape
    ((2, 1, 8, 64), (2, 8, 64, 64))
    """
    out, after = recur(
        OP,
        query,
        key,
        value,
        Recurrence(gate, g_gamma, gv, state, cu_seqlens, softmax_scale, reverse, "state"),
        Request(platform, cfg, mesh, in_specs, out_specs, axis_name=axis_name),
    )
    return out, after()


class RecurrentAttention(Module):
    """Recurrent attention as an object; see `recurrent_attention`."""

    __call__: Final = BoundFunction(recurrent_attention)
    config: ClassVar[type[RecurrentAttentionConfig]] = RecurrentAttentionConfig
