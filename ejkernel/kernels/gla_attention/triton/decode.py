"""A few tokens of every sequence, as in decoding: the state is read and written once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, padded_size, triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar
from ejkernel.kernels.gla_attention.inputs import Inputs, Spec
from ejkernel.kernels.gla_attention.triton.operands import LinearStatic, static_arguments
from ejkernel.kernels.gla_attention.triton.states import (
    decay_arrays,
    load_state,
    store_state,
    unused,
)
from ejkernel.kernels.gla_attention.triton.tokens import load_gamma
from ejkernel.ops.platform import Device

tl: Any = None

_TOKENS = 8  # more are faster in a chunk
_ELEMENTS = 8192  # of the tile of a state in a program
_WARPS = 4


def is_decoding(inputs: Inputs) -> bool:
    """Whether every sequence has so few tokens that the state is most of the memory."""
    return inputs.cu_seqlens is None and inputs.key.shape[1] <= _TOKENS


def decode(inputs: Inputs, spec: Spec, device: Device) -> tuple[jax.Array, jax.Array]:
    """The outputs [b, s, n, v] and the states [b, 1, k, h, v] after the last token, in float32.

    A first state in float32 is updated in place, where the caller has donated it.
    """
    rows = padded_size(inputs.key.shape[-1])
    static = static_arguments(
        inputs, spec, inputs.key.shape[1], 16, rows, max(16, _ELEMENTS // rows)
    )
    query, first = inputs.query, inputs.initial_state
    state = (static.batch, 1, static.kv_heads, static.rows, static.columns)
    arrays = [query, inputs.key, inputs.value, *decay_arrays(inputs)]
    in_place = first is not None and first.dtype == jnp.float32
    out, states = launch(
        decode_kernel,
        [*arrays, unused() if first is None else first],
        [
            jax.ShapeDtypeStruct((*query.shape[:3], static.columns), query.dtype),
            jax.ShapeDtypeStruct(state, jnp.float32),
        ],
        static,
        LaunchConfig(static.batch * static.kv_heads * static.column_blocks, _WARPS, 1),
        device,
        aliases={len(arrays): 1} if in_place else None,
    )
    return out, states


@triton_jit
def decode_kernel(
    query: Pointer, key: Pointer, value: Pointer, gate: Pointer, gamma: Pointer, first: Pointer,
    out: Pointer, states: Pointer,
    static: LinearStatic,
):  # fmt: skip
    """Columns of the state of one key head, token by token."""
    program = tl.program_id(0)
    column = program % static.column_blocks * static.block_columns
    head = program // static.column_blocks % static.kv_heads
    batch = program // (static.column_blocks * static.kv_heads)
    index = batch.to(tl.int64) * static.kv_heads + head
    rows = tl.arange(0, static.block_rows)
    columns = column + tl.arange(0, static.block_columns)
    if static.initial:
        state = load_state(
            first, index, 0, column, static.block_rows, static.block_columns, static
        ).to(tl.float32)
    else:
        state = tl.full([static.block_rows, static.block_columns], 0.0, tl.float32)
    for i in range(static.tokens):
        token = i
        if static.reverse:
            token = static.tokens - 1 - i
        row = batch.to(tl.int64) * static.tokens + token
        at = row * static.kv_heads + head
        k = tl.load(key + at * static.rows + rows, mask=rows < static.rows, other=0.0)
        v = tl.load(value + at * static.columns + columns, mask=columns < static.columns, other=0.0)
        if static.decays:
            state = state * tl.exp(_log_decays(gate, gamma, at, batch, head, static))[:, None]
        state += k.to(tl.float32)[:, None] * v.to(tl.float32)[None, :]
        for j in range(static.group):
            own = row * static.heads + head * static.group + j
            q = tl.load(query + own * static.rows + rows, mask=rows < static.rows, other=0.0)
            result = tl.sum(q.to(tl.float32)[:, None] * state, 0) * static.scale
            tl.store(
                out + own * static.columns + columns,
                result.to(out.dtype.element_ty),
                mask=columns < static.columns,
            )
    store_state(states, state, index, 0, column, static.block_rows, static.block_columns, static)


@triton_jit
def _log_decays(
    gate: Pointer, gamma: Pointer, at: Scalar, batch: Scalar, head: Scalar, static: LinearStatic
):
    """The log decays [block_rows] of the rows of a state at one token."""
    rows = tl.arange(0, static.block_rows)
    decays = tl.full([static.block_rows], 0.0, tl.float32)
    if static.channel:
        gates = tl.load(gate + at * static.rows + rows, mask=rows < static.rows, other=0.0)
        decays += gates.to(tl.float32)
    elif static.gate:
        decays += tl.load(gate + at).to(tl.float32)
    if static.gamma:
        decays += load_gamma(gamma, batch, head, static)
    return decays
