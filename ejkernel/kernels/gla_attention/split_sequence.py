"""Gated linear attention over a sequence that is split over the devices of a mesh axis.

Over its tokens shard `i` turns the state that enters it into

    E[i + 1] = D[i] * E[i] + S[i]

with `D` the decay over all of them and `S` the state that they leave if they begin with none. Every
device computes `D` and `S` of its shard with one matmul, gathers those of all shards, folds those
before its own, and makes the call for its tokens with the result as the initial state. What is
exchanged does not depend on the length of the sequence, nor does what the gradient sends back
(https://arxiv.org/abs/2502.07563).

Of packed sequences only one is in progress at the end of a shard. `D` is 0 unless it began before
the shard, and `S` begins with its initial state if it begins inside.

Exponents are sums of neighbouring decays, as in `chunk_recurrence`, and the fold is in float32.
"""

import functools
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
    if inputs.initial_state is not None:
        dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
        inputs = inputs._replace(initial_state=inputs.initial_state.astype(dtype))
    if inputs.cu_seqlens is None:
        summary = _of_tokens(inputs, None, spec.reverse)
        initial = None if inputs.initial_state is None else inputs.initial_state[:, 0]
        before, after = _folded(inputs, initial, summary, spec, axis_name)
        out, _ = run(inputs._replace(initial_state=before[:, None]))
        return Outputs(out, _same_everywhere(after, spec, axis_name)[:, None])

    packed = _packed(inputs.cu_seqlens[0], inputs.key.shape[1], spec.reverse, axis_name)
    summary = _of_packed(inputs, packed, spec)
    before, _ = _folded(inputs, None, summary, spec, axis_name)
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
    entering: jax.Array  # [m]: whether it is in progress before the shard
    leaving: jax.Array  # [m]: whether it is in progress after the shard
    ending: jax.Array  # [m]: whether its last state is computed here
    used: jax.Array  # [s]: whether a token is of the sequence that is leaving


def _packed(ends: jax.Array, tokens: int, reverse: bool, axis_name: str) -> _Packed:
    ends, shard = ends.astype(jnp.int32), lax.axis_index(axis_name)
    start, stop = shard * tokens, (shard + 1) * tokens
    first, end = ends[:-1], ends[1:]
    at_start, at_stop = (first < start) & (start < end), (first < stop) & (stop < end)
    entering, leaving = (at_stop, at_start) if reverse else (at_start, at_stop)
    last = first if reverse else end - 1
    ending = jnp.where(first == end, shard == 0, (start <= last) & (last < stop))
    token = start + jnp.arange(tokens, dtype=jnp.int32)[:, None]
    used = ((first <= token) & (token < end) & leaving).any(1)
    return _Packed(jnp.clip(ends - start, 0, tokens), entering, leaving, ending, used)


class _Summary(NamedTuple):
    """What a shard does to a state [b, k, h, v]: `state * rows * columns + added`."""

    rows: jax.Array | None  # [b, k, h or 1, 1]; None: no decay
    columns: jax.Array | None  # [b, k, 1, v]
    added: jax.Array

    def decayed(self, state: jax.Array) -> jax.Array:
        for factor in (self.rows, self.columns):
            state = state if factor is None else state * factor
        return state


# Recomputed in the backward pass: decayed keys and values in float32 are larger than the inputs.
@functools.partial(jax.checkpoint, static_argnums=(2,))
def _of_tokens(inputs: Inputs, used: jax.Array | None, reverse: bool) -> _Summary:
    """What the tokens of a shard do to a state, or those that are used: others may hold NaN."""
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)

    def read(x: jax.Array) -> jax.Array:
        return (
            x.astype(dtype) if used is None else jnp.where(used[:, None, None], x, 0).astype(dtype)
        )

    arrays = (inputs.key, inputs.value, inputs.gate, inputs.gv)
    key, value, gate, gv = jax.tree.map(read, arrays)
    if inputs.g_gamma is not None:
        gamma = jnp.broadcast_to(inputs.g_gamma[:, None, :, None], (*key.shape[:3], 1))
        gate = read(gamma) if gate is None else gate + read(gamma)
    key, rows = _to_end(key, gate, reverse)
    value, columns = _to_end(value, gv, reverse)
    return _Summary(
        None if rows is None else rows[..., None],
        None if columns is None else columns[:, :, None],
        matmul("bskh,bskv->bkhv", key, value),
    )


def _of_packed(inputs: Inputs, packed: _Packed, spec: Spec) -> _Summary:
    """What a shard does to the state of the packed sequence that leaves it."""
    summary = _of_tokens(inputs, packed.used, spec.reverse)
    added = summary.added
    if inputs.initial_state is not None:
        begins = _per_state(packed.leaving & ~packed.entering)
        added += summary.decayed(jnp.where(begins, inputs.initial_state, 0.0).sum(1))
    rows = summary.rows
    if rows is None:
        rows = jnp.ones((*added.shape[:2], 1, 1), added.dtype)
    began_before = (packed.leaving & packed.entering).any()
    return summary._replace(rows=jnp.where(began_before, rows, 0.0), added=added)


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


def _folded(
    inputs: Inputs, initial: jax.Array | None, summary: _Summary, spec: Spec, axis_name: str
) -> tuple[jax.Array, jax.Array]:
    """The states [b, k, h, v] before this shard and after all of them."""
    index = lax.axis_index(axis_name)
    zeros = carries.zeros(summary.added.shape, summary.added.dtype, inputs, index)

    def step(carry: tuple, indexed: tuple) -> tuple[tuple, None]:
        before, state = carry
        shard, summary = indexed
        before = jnp.where(shard == index, state, before)
        return (before, summary.decayed(state) + summary.added), None

    start = (zeros, zeros if initial is None else zeros + initial)
    every = jnp.arange(lax.axis_size(axis_name), dtype=jnp.int32)
    shards = (every, _gathered(summary, axis_name))
    return lax.scan(step, start, shards, reverse=spec.reverse)[0]


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


def _per_state(flags: jax.Array) -> jax.Array:
    """[m] -> [1, m, 1, 1, 1]"""
    return flags[None, :, None, None, None]


def _same_everywhere(state: jax.Array, spec: Spec, axis_name: str) -> jax.Array:
    """The final state, typed as invariant over the axis: only a sum over the devices is."""
    if axis_name not in varying_axes(state):
        return state
    last = 0 if spec.reverse else lax.axis_size(axis_name) - 1
    return lax.psum(jnp.where(lax.axis_index(axis_name) == last, state, 0.0), axis_name)
