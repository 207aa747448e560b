"""Gated linear attention on NVIDIA GPUs since Ampere, in Triton: dispatch, and what is supported.

Sequences are cut into segments, so that few heads occupy the device too. `states` computes what
every segment begins with, `forward` the outputs along it; `decode` has a kernel for few tokens. The
backward pass computes the states before all chunks and the gradients of those after them, then all
chunks at once.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.triton import bridge
from ejkernel.kernels.common.triton.bridge import LaunchConfig
from ejkernel.kernels.gla_attention.config import GLAttentionConfig
from ejkernel.kernels.gla_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.gla_attention.triton import backward, configs, decode, forward, states
from ejkernel.kernels.gla_attention.triton.operands import (
    LinearStatic,
    TokenLists,
    covered_tokens,
    static_arguments,
    token_lists,
)
from ejkernel.kernels.gla_attention.xla import Residuals
from ejkernel.ops.implementation import Implementation, Pass, yields_to_xla
from ejkernel.ops.platform import Device


def run_forward(
    inputs: Inputs, spec: Spec, params: GLAttentionConfig, device: Device
) -> tuple[Outputs, Residuals]:
    """Output of every token, state after every sequence."""
    if decode.is_decoding(inputs):
        return Outputs(*decode.decode(inputs, spec, device)), Residuals()
    lists, static, tiled, run = _shared_arguments(inputs, spec, params, device)
    operands = forward.chunk_operands(inputs, lists, static, *run)
    entered = states.states_before_segments(
        (operands.key, inputs.value), operands.decays, inputs.initial_state, lists, tiled, *run
    )
    out, last = forward.outputs(operands, inputs.value, entered, lists, static, *run)
    last = _of_filled(last, inputs.initial_state, inputs)
    return Outputs(_covered(out, inputs), last), Residuals()


def run_backward(
    inputs: Inputs,
    residuals: Residuals,
    d_outputs: Outputs,
    spec: Spec,
    params: GLAttentionConfig,
    device: Device,
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    lists, static, tiled, run = _shared_arguments(inputs, spec, params, device)
    d_out = d_outputs.out.astype(inputs.query.dtype)

    operands = forward.chunk_operands(inputs, lists, static, *run)
    added = operands.key, inputs.value
    entered = states.states_before_segments(
        added, operands.decays, inputs.initial_state, lists, tiled, *run
    )
    before, _ = states.states_of_chunks(added, operands.decays, entered, lists, tiled, *run)

    back = dataclasses.replace(tiled, backward_in_time=True, last=inputs.initial_state is not None)
    added = bridge.interpreted_after(operands.query, before), d_out
    entered = states.states_before_segments(
        added, operands.decays, d_outputs.state, lists, back, *run
    )
    d_after, d_initial = states.states_of_chunks(added, operands.decays, entered, lists, back, *run)

    d_value = backward.value_gradient(operands, d_out, d_after, lists, tiled, *run)
    d_out = bridge.interpreted_after(d_out, d_value)
    d_scores = backward.score_gradients(inputs, d_out, lists, tiled, *run)
    chunk_states = backward.ChunkStates(before, d_after)
    d_query, d_key, d_decays = backward.key_gradients(
        inputs, d_out, d_scores, chunk_states, lists, static, *run
    )
    d_gate, d_gamma = _decay_gradients(inputs, d_decays)
    gradients = Inputs(
        _covered(d_query, inputs),
        _covered(d_key, inputs),
        _covered(d_value, inputs),
        gate=d_gate,
        g_gamma=d_gamma,
        initial_state=None
        if inputs.initial_state is None
        else _of_filled(d_initial, d_outputs.state, inputs),
    )
    given = inputs._replace(cu_seqlens=None)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, given)


class _SharedArguments(NamedTuple):
    """What the launches of a call take besides its arrays."""

    lists: TokenLists
    static: LinearStatic
    tiled: LinearStatic  # of the kernels that have a tile of the state of their own
    run: tuple[LaunchConfig, Device]


def _shared_arguments(
    inputs: Inputs, spec: Spec, params: GLAttentionConfig, device: Device
) -> _SharedArguments:
    tiles = configs.tiles_of(inputs, params)
    segment = configs.segment_tokens(inputs, tiles, device)
    static = static_arguments(inputs, spec, segment, *tiles[:3])
    return _SharedArguments(
        token_lists(inputs, spec.reverse, tiles.chunk, segment),
        static,
        static.tiled(*configs.state_tile(inputs)),
        (tiles.launch, device),
    )


def _covered(x: jax.Array, inputs: Inputs) -> jax.Array:
    """`x` [b, s, ...], 0 for tokens past the last packed sequence."""
    covered = covered_tokens(inputs)
    return x if covered is None else jnp.where(covered, x, 0)


def _of_filled(states: jax.Array, given: jax.Array | None, inputs: Inputs) -> jax.Array:
    """The states after sequences with tokens; those without keep what they were given."""
    if inputs.cu_seqlens is None:
        return states
    filled = (inputs.cu_seqlens[:, 1:] > inputs.cu_seqlens[:, :-1])[..., None, None, None]
    return jnp.where(filled, states, 0.0 if given is None else given)


def _decay_gradients(
    inputs: Inputs, d_decays: jax.Array | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """The gradients of gates and of the decays of heads, from those of their sum."""
    if d_decays is None:
        return None, None
    d_decays = _covered(d_decays, inputs)
    gate, d_gate, d_gamma = inputs.gate, None, None
    if gate is not None:
        d_gate = d_decays if gate.shape[-1] > 1 else d_decays.sum(-1, keepdims=True)
    if inputs.g_gamma is not None:
        d_gamma = d_decays.sum((1, 3))
    return d_gate, d_gamma


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the kernels do not support a call, or None."""
    dtypes = {np.dtype(x.dtype) for x in inputs[:3]}
    if len(dtypes) > 1:
        return "takes query, key and value of one dtype"
    if inputs.key.shape[-1] > configs.MAX_WIDTH:
        return f"takes a head_dim of at most {configs.MAX_WIDTH}, got {inputs.key.shape[-1]}"
    others = [inputs.gate, inputs.g_gamma, inputs.initial_state]
    return bridge.why_not(device, *dtypes, *(x.dtype for x in others if x is not None))


_pass = functools.partial(
    Pass,
    features=frozenset({"cu_seqlens", "g_gamma", "gate", "initial_state", "reverse"}),
    why_not=why_not,
    yields_to=yields_to_xla,
)

IMPLEMENTATION = Implementation(
    forward=_pass(
        run=run_forward,
        heuristic=configs.heuristic_forward,
        candidates=configs.candidates_forward,
    ),
    backward=_pass(
        run=run_backward,
        heuristic=configs.heuristic_backward,
        candidates=configs.candidates_backward,
    ),
)
