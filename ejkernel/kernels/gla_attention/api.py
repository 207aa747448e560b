"""The call: what it takes, what it means, how it becomes `Inputs` and `Spec`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal, overload

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import (
    as_array,
    check_attention_shapes,
    check_floating,
    cumulative_lengths,
    specs_with_batch_axis,
    static_number,
    with_batch_axis,
)
from ejkernel.kernels.gla_attention import OP
from ejkernel.kernels.gla_attention.config import GLAttentionConfig
from ejkernel.kernels.gla_attention.inputs import Inputs, Spec
from ejkernel.ops import executor, split_axis
from ejkernel.ops.executor import Request
from ejkernel.ops.implementation import Op
from ejkernel.ops.module import BoundFunction, Module, operation
from ejkernel.ops.split_axis import SplitAxis


@overload
def gla_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    gate: ArrayLike | None = None,
    g_gamma: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: Literal[False] = False,
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: GLAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array: ...


@overload
def gla_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    gate: ArrayLike | None = None,
    g_gamma: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: Literal[True],
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: GLAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@operation
def gla_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    gate: ArrayLike | None = None,
    g_gamma: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: GLAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Gated linear attention: a state of fixed size that decays by gates at every token.

        state[t] = exp(gate[t] + g_gamma) * state[t - 1] + key[t] value[t]^T
        output[t] = softmax_scale * query[t]^T state[t]

    with a state `[head_dim, value_dim]` for each key head, whose rows decay by `exp(gate[t])` and
    all of which decays by `exp(g_gamma)`. Both are logarithms of decays: 0 keeps, -inf forgets, and
    above 0 the state grows. Query head `i` uses key head `i // (heads // kv_heads)`. Time and
    memory are linear in the length.

    Args:
        query: `[batch, length, heads, head_dim]`; all arrays and results of a call may also come
            without the batch.
        key: `[batch, length, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
        value: `[batch, length, kv_heads, value_dim]`.
        gate: `[batch, length, kv_heads, head_dim]`, or `[batch, length, kv_heads]` for one that all
            rows of the state share; by default 0.
        g_gamma: a number, `[kv_heads]` or `[batch, kv_heads]`, the same for all tokens; by
            default 0.
        initial_state: the state before the first token, `[batch, kv_heads, head_dim, value_dim]`
            (packed: `[sequences, ...]`); by default 0.
        cu_seqlens: `[0, l1, l1 + l2, ...]`, sequences packed into one row, each with a state of its
            own. Tokens past the last give 0.
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
        in_specs: with `mesh`, the specs of query, key and value, and if wanted that of gate; the
            others follow from them.
        out_specs: the spec of the output; it follows from `in_specs`.

    Returns:
        The output `[batch, length, heads, value_dim]` in the dtype of the query. With
        `return_state` a pair of it and the state, shaped like `initial_state`, in float32 (float64
        for float64 inputs). Gradients flow through both.

    Raises:
        ValueError: the arguments do not fit each other.
        UnsupportedError: the requested platform does not support the call.

    >>> import jax, jax.numpy as jnp
    >>> from ejkernel.modules import gla_attention
    >>> x = jnp.ones((2, 128, 8, 64))
    >>> gla_attention(x, x, x, gate=jax.nn.log_sigmoid(x)).shape
    (2, 128, 8, 64)
    """
    out, state = recur(
        OP,
        query,
        key,
        value,
        Recurrence(gate, g_gamma, None, initial_state, cu_seqlens, softmax_scale, reverse),
        Request(platform, cfg, mesh, in_specs, out_specs, axis_name=axis_name),
    )
    return (out, state()) if return_state else out


@dataclasses.dataclass
class Recurrence:
    """What makes one linear recurrence another, as the caller gave it."""

    gate: Any = None
    g_gamma: Any = None
    gv: Any = None
    state: Any = None
    cu_seqlens: Any = None
    softmax_scale: Any = None
    reverse: bool = False
    state_name: str = "initial_state"


def recur(
    op: Op, query: Any, key: Any, value: Any, recurrence: Recurrence, request: Request
) -> tuple[jax.Array, Callable[[], jax.Array]]:
    """The output and, when called for, the state after it: what every linear recurrence gives."""
    name = op.name
    query, key, value, bare = with_batch_axis(name, query, key, value)
    check_attention_shapes(name, query, key, value)
    if key.shape[1] != query.shape[1]:
        raise ValueError(
            f"{name}: query and key must have one length, got {query.shape[1]} and {key.shape[1]}."
        )
    request = _canonical(request, recurrence.cu_seqlens is not None, bare)
    split = split_axis.resolve(
        name,
        request.axis_name,
        arrays={"query": query, "key": key, "value": value},
        lengths={"tokens": query.shape[1]},
        specs=(PartitionSpec(None, request.axis_name),) * 3,
        mesh=request.mesh,
        in_specs=request.in_specs,
    )
    inputs = _inputs(name, query, key, value, recurrence, bare, split)
    spec = Spec(
        softmax_scale=query.shape[3] ** -0.5
        if recurrence.softmax_scale is None
        else static_number(name, "softmax_scale", recurrence.softmax_scale),
        reverse=bool(recurrence.reverse),
    )
    if 0 in (*query.shape, value.shape[3]):
        out, state = _nothing(inputs)
    else:
        request = dataclasses.replace(
            request, mesh=split.mesh, in_specs=split.in_specs, axis_name=split.name
        )
        out, state = executor.run(op, inputs, spec, request)
    sequences = () if bare and recurrence.cu_seqlens is None else (state.shape[0] * state.shape[1],)
    out = out.reshape(out.shape[1:]) if bare else out
    return out, lambda: state.reshape(*sequences, *state.shape[2:])


def _inputs(
    op: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    given: Recurrence,
    bare: bool,
    split: SplitAxis,
) -> Inputs:
    batch, tokens, heads, rows = key.shape
    columns = value.shape[3]
    cu_seqlens = None
    if given.cu_seqlens is not None:
        if batch != 1:
            raise ValueError(
                f"{op}: cu_seqlens describe one packed row, got a batch of {batch}; rows that are "
                "sequences of their own need none."
            )
        cu_seqlens = cumulative_lengths(op, "cu_seqlens", given.cu_seqlens, split.whole(tokens))
    gate = _given(op, "gate", given.gate)
    if gate is not None:
        gate = _batched(gate, bare)
        if gate.shape not in ((batch, tokens, heads), (batch, tokens, heads, rows)):
            first = "" if bare else "batch, "
            raise ValueError(
                f"{op}: gate must be [{first}length, kv_heads] or [{first}length, kv_heads, "
                f"head_dim] = {[batch, tokens, heads, rows][bare:]}, got {list(gate.shape)[bare:]}."
            )
    gv = _given(op, "gv", given.gv)
    if gv is not None:
        gv = _batched(gv, bare)
        if gv.shape != value.shape:
            first = "" if bare else "batch, "
            raise ValueError(
                f"{op}: gv must be [{first}length, kv_heads, value_dim] = "
                f"{list(value.shape)[bare:]}, got {list(gv.shape)[bare:]}."
            )
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = _given(op, given.state_name, given.state)
    if state is not None:
        alone = bare and cu_seqlens is None
        if state.shape != (count, heads, rows, columns)[alone:]:
            per = "" if alone else "batch, " if cu_seqlens is None else "sequences, "
            raise ValueError(
                f"{op}: {given.state_name} must be [{per}kv_heads, head_dim, value_dim] = "
                f"{[count, heads, rows, columns][alone:]}, got {list(state.shape)}."
            )
    g_gamma = _per_head(op, "g_gamma", given.g_gamma, batch, heads)
    short = {
        "gate": gate if gate is not None and gate.ndim == 3 else None,
        "g_gamma": g_gamma if g_gamma is not None and g_gamma.shape != (batch, heads) else None,
        "initial_state": state,
        "cu_seqlens": cu_seqlens,
    }
    inputs = Inputs(query, key, value, gate, g_gamma, gv)
    if short := {name: x for name, x in short.items() if x is not None}:
        inputs = inputs._replace(**_with_all_axes(short, batch, heads))
    return inputs


@functools.partial(jax.jit, static_argnums=(1, 2))
def _with_all_axes(short: dict[str, jax.Array], batch: int, heads: int) -> dict[str, jax.Array]:
    """Arrays with the axes that `Inputs` names: one program for all, in an eager call."""
    arrange = {
        "gate": lambda x: x[..., None],
        "g_gamma": lambda x: jnp.broadcast_to(x, (batch, heads)),
        "initial_state": lambda x: x.reshape(batch, -1, *x.shape[-3:]),
        "cu_seqlens": lambda x: x[None],
    }
    return {name: arrange[name](x) for name, x in short.items()}


def _per_head(op: str, name: str, x: Any, batch: int, heads: int) -> jax.Array | None:
    """A number for all, one for each key head, or one for each of every row."""
    x = _given(op, name, x)
    if x is None:
        return None
    if x.shape not in ((), (heads,), (batch, heads)):
        raise ValueError(
            f"{op}: {name} must be a number, [kv_heads] or [batch, kv_heads] = {[batch, heads]}, "
            f"got {list(x.shape)}."
        )
    return x


def _given(op: str, name: str, x: Any) -> jax.Array | None:
    """An array of floats, if there is one."""
    if x is None:
        return None
    x = as_array(op, name, x)
    check_floating(op, name, x.dtype)
    return x


def _batched(x: jax.Array, bare: bool) -> jax.Array:
    """What belongs to tokens without a batch axis gets one."""
    return x.reshape(1, *x.shape) if bare else x


def _canonical(request: Request, packed: bool, bare: bool) -> Request:
    """The request with specs for the arrays of a shard: a batch of tokens, states by sequence."""
    into: Any = request.in_specs
    out: Any = request.out_specs
    several = isinstance(out, tuple) and not isinstance(out, PartitionSpec)
    first, *states = out if several else (out,)
    if len(states) == 1 and isinstance(states[0], PartitionSpec):
        states = [_spec_of_states(states[0], packed, bare)]
    if bare:
        into, first = specs_with_batch_axis(into), specs_with_batch_axis(first)
    out = (first, *states) if several else first
    return dataclasses.replace(request, in_specs=into, out_specs=out)


def _spec_of_states(spec: PartitionSpec, packed: bool, bare: bool) -> PartitionSpec:
    """The spec of states [batch, sequences, ...] from that of states as the caller sees them."""
    entries = tuple(spec)
    if packed:
        return PartitionSpec(None, *entries)
    if bare:
        return PartitionSpec(None, None, *entries)
    return PartitionSpec(*entries[:1], None, *entries[1:])


def _nothing(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The results where there is no token, or nothing in one: the states are as they were."""
    batch, _, heads, rows = inputs.key.shape
    columns, dtype = inputs.value.shape[3], inputs.query.dtype
    count = 1 if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[1] - 1
    state = jnp.zeros((batch, count, heads, rows, columns), jnp.promote_types(dtype, jnp.float32))
    if inputs.initial_state is not None:
        state += inputs.initial_state
    return jnp.zeros((*inputs.query.shape[:3], columns), dtype), state


class GLAttention(Module):
    """Gated linear attention as an object; see `gla_attention`."""

    __call__: Final = BoundFunction(gla_attention)
    config: ClassVar[type[GLAttentionConfig]] = GLAttentionConfig
