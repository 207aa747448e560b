"""Gated linear attention over a sequence that is split over the devices of a mesh axis.

Over its tokens shard `i` turns the state that enters it into

    E[i + 1] = D[i] * E[i] + S[i]

with `D` the decay over all of them and `S` the state that they leave if they begin with none. Every
device computes `D` and `S` of its shard with one matmul, gathers those of all shards, finds the
state that enters its own, and makes the call for its tokens with that as the initial state. What is
exchanged does not depend on the length of the sequence; the gradient is exchanged in the same way
(https://arxiv.org/abs/2502.07563).

Of packed sequences only one is in progress at the end of a shard. `D` is 0 unless it began before
the shard, and `S` begins with its initial state if it begins inside.

All exponents are sums of neighbouring decays, as in `chunk_recurrence`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import carry as carries
from ejkernel.kernels.common.precision import matmul
from ejkernel.kernels.gla_attention.inputs import Inputs, Outputs, Spec
from ejkernel.ops.meshes import varying_axes


def over_axis(
    run: Callable[[Inputs], Outputs], inputs: Inputs, spec: Spec, axis_name: str
) -> Outputs:
    """The call on this device's shard; `run` computes a call on one device."""
    packed = None
    if inputs.cu_seqlens is not None:
        packed = _packed(inputs.cu_seqlens[0], inputs.key.shape[1], spec.reverse, axis_name)
    before, after = _states(inputs, spec, packed, axis_name)
    if packed is None:
        out, _ = run(inputs._replace(initial_state=before[:, None]))
        return Outputs(out, _same_everywhere(after, spec, axis_name)[:, None])
    shape = (1, packed.ends.shape[0] - 1, *before.shape[1:])
    initial = carries.zeros(shape, before.dtype, before)
    if inputs.initial_state is not None:
        initial += inputs.initial_state
    initial = jnp.where(_per_state(packed.entering), before[:, None], initial)
    out, states = run(inputs._replace(initial_state=initial, cu_seqlens=packed.ends[None]))
    return Outputs(out, lax.psum(jnp.where(_per_state(packed.ending), states, 0.0), axis_name))


class _Packed(NamedTuple):
    """The packed sequences as this shard sees them; `m` sequences, `s` tokens."""

    ends: jax.Array  # [m + 1]: where they begin and end in the shard
    entering: jax.Array  # [m]: the one that is in progress where the shard begins in time
    leaving: jax.Array  # [m]: likewise where it ends
    ending: jax.Array  # [m]: those whose last state is computed here
    used: jax.Array  # [s]: the tokens of the one that is leaving


def _packed(ends: jax.Array, tokens: int, reverse: bool, axis_name: str) -> _Packed:
    ends, shard = ends.astype(jnp.int32), lax.axis_index(axis_name)
    start = shard * tokens
    begin, end = ends[:-1], ends[1:]
    lower, upper = ((begin < boundary) & (boundary < end) for boundary in (start, start + tokens))
    entering, leaving = (upper, lower) if reverse else (lower, upper)
    last = begin if reverse else end - 1
    ending = jnp.where(begin == end, shard == 0, (start <= last) & (last < start + tokens))
    token = start + jnp.arange(tokens, dtype=jnp.int32)[:, None]
    used = ((begin <= token) & (token < end) & leaving).any(1)
    return _Packed(jnp.clip(ends - start, 0, tokens), entering, leaving, ending, used)


class _Summary(NamedTuple):
    """What a shard does to a state [b, k, h, v]: `state * rows * columns + added`.

    `rows` is [b, k, h or 1, 1], `columns` [b, k, 1, v]; None where nothing decays.
    """

    rows: jax.Array | None
    columns: jax.Array | None
    added: jax.Array

    def decayed(self, state: jax.Array) -> jax.Array:
        for factor in (self.rows, self.columns):
            state = state if factor is None else state * factor
        return state


def _states(
    inputs: Inputs, spec: Spec, packed: _Packed | None, axis_name: str
) -> tuple[jax.Array, jax.Array]:
    """The states [b, k, h, v] before this shard and after all of them."""
    summary = _summary(inputs, spec, packed)
    index = lax.axis_index(axis_name)
    zeros = carries.zeros(summary.added.shape, summary.added.dtype, inputs, index)
    initial = zeros
    if packed is None and inputs.initial_state is not None:
        initial += inputs.initial_state[:, 0]

    def step(carry: tuple, indexed: tuple) -> tuple[tuple, None]:
        before, state = carry
        shard, summary = indexed
        before = jnp.where(shard == index, state, before)
        return (before, summary.decayed(state) + summary.added), None

    every = jnp.arange(lax.axis_size(axis_name), dtype=jnp.int32)
    shards = (every, _gathered(summary, axis_name))
    (before, after), _ = lax.scan(step, (zeros, initial), shards, reverse=spec.reverse)
    return before, after


def _gathered(summary: _Summary, axis_name: str) -> _Summary:
    """The summaries of all shards, by one collective."""
    batch, heads = summary.added.shape[:2]
    leaves, treedef = jax.tree.flatten(summary)
    flat = jnp.concatenate([x.reshape(batch, heads, -1) for x in leaves], axis=-1)
    flat = lax.all_gather(flat, axis_name)
    parts, start = [], 0
    for x in leaves:
        end = start + math.prod(x.shape[2:])
        parts.append(flat[..., start:end].reshape(-1, *x.shape))
        start = end
    return jax.tree.unflatten(treedef, parts)


def _summary(inputs: Inputs, spec: Spec, packed: _Packed | None) -> _Summary:
    """What this shard does to a state, in float32."""
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)

    # Recomputed in the backward pass: decayed keys and values take more memory than the inputs.
    @jax.checkpoint
    def of_tokens(inputs: Inputs) -> _Summary:
        read = lambda x: x.astype(dtype)
        if packed is not None:  # other tokens may hold anything
            read = lambda x: jnp.where(packed.used[:, None, None], x.astype(dtype), 0.0)
        key, value, gate, gv = jax.tree.map(
            read, (inputs.key, inputs.value, inputs.gate, inputs.gv)
        )
        if inputs.g_gamma is not None:
            gamma = inputs.g_gamma.astype(dtype)[:, None, :, None]
            gamma = read(jnp.broadcast_to(gamma, (*key.shape[:3], 1)))
            gate = gamma if gate is None else gate + gamma
        key, rows = _to_end(key, gate, spec.reverse)
        value, columns = _to_end(value, gv, spec.reverse)
        added = matmul("bskh,bskv->bkhv", key, value)
        rows = None if rows is None else rows[..., None]
        return _Summary(rows, None if columns is None else columns[:, :, None], added)

    summary = of_tokens(inputs)
    if packed is None:
        return summary
    if inputs.initial_state is not None:
        begins = _per_state(packed.leaving & ~packed.entering)
        initial = jnp.where(begins, inputs.initial_state.astype(dtype), 0.0).sum(1)
        summary = summary._replace(added=summary.added + summary.decayed(initial))
    spans = (packed.leaving & packed.entering).any()
    rows = (
        jnp.ones((*summary.added.shape[:2], 1, 1), dtype) if summary.rows is None else summary.rows
    )
    return summary._replace(rows=jnp.where(spans, rows, 0.0))


def _to_end(
    x: jax.Array, decays: jax.Array | None, reverse: bool
) -> tuple[jax.Array, jax.Array | None]:
    """`x` [b, s, k, d], decayed over the tokens after its own; the decay [b, k, d] over all."""
    if decays is None:
        return x, None
    sums = lax.cumsum(decays, axis=1, reverse=not reverse)  # over its own and those after it
    none = jnp.zeros_like(sums[:, :1])
    if reverse:
        return x * jnp.exp(jnp.concatenate([none, sums[:, :-1]], 1)), jnp.exp(sums[:, -1])
    return x * jnp.exp(jnp.concatenate([sums[:, 1:], none], 1)), jnp.exp(sums[:, 0])


def _per_state(flags: jax.Array) -> jax.Array:
    """[m] -> [1, m, 1, 1, 1]"""
    return flags[None, :, None, None, None]


def _same_everywhere(state: jax.Array, spec: Spec, axis_name: str) -> jax.Array:
    """The state after all shards, of a type that says that all devices have the same.

    Types say so only of sums. Where they say nothing of devices, it costs nothing.
    """
    if axis_name not in varying_axes(state):
        return state
    last = 0 if spec.reverse else lax.axis_size(axis_name) - 1
    return lax.psum(jnp.where(lax.axis_index(axis_name) == last, state, 0.0), axis_name)
