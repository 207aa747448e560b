"""The forward kernels: products of the tokens of a chunk, and the outputs along every segment."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.triton.bridge import (
    LaunchConfig,
    interpreted_after,
    launch,
    padded_size,
    triton_jit,
)
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, Tensor
from ejkernel.kernels.gla_attention.inputs import Inputs
from ejkernel.kernels.gla_attention.triton.operands import (
    LinearStatic,
    TokenLists,
    operand_dtype,
)
from ejkernel.kernels.gla_attention.triton.states import (
    Decays,
    decay_arrays,
    load_entered,
    load_segment,
    load_total,
    segment_position,
    store_state,
    store_total,
    unused,
)
from ejkernel.kernels.gla_attention.triton.tokens import (
    channel_end,
    channel_start,
    chunk_rows,
    fits_one_factor,
    head_end,
    head_start,
    head_total,
    level_factors,
    level_pairs,
    load_gamma,
    load_gates,
    load_head_gates,
    load_tokens,
    middle_exponents,
    pairs,
    store_tokens,
    token_rows,
)
from ejkernel.ops.platform import Device

tl: Any = None


class ChunkOperands(NamedTuple):
    """What the kernels that visit chunks in order are given in place of queries, keys and gates.

    Attributes:
        query: decayed from the start of the chunk, where every row of a state has a gate.
        key: likewise, decayed to its end.
        decays: of the states.
        scores: the decayed products [b, chunks, n, t, s] of queries and keys, 0 where s > t; None
            where the rows of a state share a decay.
    """

    query: jax.Array
    key: jax.Array
    decays: Decays
    scores: jax.Array | None


def chunk_operands(
    inputs: Inputs, lists: TokenLists, static: LinearStatic, config: LaunchConfig, device: Device
) -> ChunkOperands:
    """Decayed queries and keys, and their products, where every row of a state has a gate."""
    decays = decay_arrays(inputs)
    if not static.channel:
        return ChunkOperands(inputs.query, inputs.key, decays, None)
    shape = (static.batch, static.chunks, static.heads, static.chunk, static.chunk)
    totals = (static.batch, static.chunks, static.kv_heads, static.rows)
    dtype = operand_dtype(inputs.query.dtype)
    query, key, totals, scores = launch(
        score_kernel,
        [lists.chunks, inputs.query, inputs.key, *decays],
        [
            jax.ShapeDtypeStruct(inputs.query.shape, dtype),
            jax.ShapeDtypeStruct(inputs.key.shape, dtype),
            jax.ShapeDtypeStruct(totals, jnp.float32),
            jax.ShapeDtypeStruct(shape, dtype),
        ],
        static,
        config._replace(programs=static.batch * static.chunks * static.heads),
        device,
    )
    return ChunkOperands(query, key, decays._replace(gate=totals), scores)


def outputs(
    operands: ChunkOperands,
    value: jax.Array,
    entered: jax.Array | None,
    lists: TokenLists,
    static: LinearStatic,
    config: LaunchConfig,
    device: Device,
) -> tuple[jax.Array, jax.Array]:
    """The outputs [b, s, n, v] of all tokens and the states [b, m, k, h, v] after the sequences.

    `entered` are the states before the segments. Sequences without tokens have no state.
    """
    static = dataclasses.replace(
        static, initial=entered is not None, block_rows=padded_size(static.rows)
    )
    query, key, decays, scores = operands
    if entered is not None:
        query = interpreted_after(query, entered)
    state = (static.kv_heads, static.rows, static.columns)
    out, states = launch(
        output_kernel,
        [
            lists.segments,
            query,
            key,
            value,
            *decays,
            unused() if scores is None else scores,
            unused() if entered is None else entered,
        ],
        [
            jax.ShapeDtypeStruct((*query.shape[:3], static.columns), value.dtype),
            jax.ShapeDtypeStruct((static.batch, static.sequences, *state), jnp.float32),
        ],
        static,
        config._replace(
            programs=static.batch * static.segments * static.kv_heads * static.column_blocks
        ),
        device,
    )
    return out, states


@triton_jit
def score_kernel(
    chunks: Pointer, query: Pointer, key: Pointer, gate: Pointer, gamma: Pointer,
    decayed_query: Pointer, decayed_key: Pointer, totals: Pointer, scores: Pointer,
    static: LinearStatic,
):  # fmt: skip
    """The decayed queries, keys and products of one head in one chunk."""
    batch, chunk, head = chunk_position(tl.program_id(0), static.heads, static)
    token, length = load_chunk(chunks, batch, chunk, static)
    if length > 0:
        kv_head = head // static.group
        rows = token_rows(batch, token, static)
        gamma_value = 0.0
        if static.gamma:
            gamma_value = load_gamma(gamma, batch, kv_head, static)
        time = tl.arange(0, static.chunk)
        acc = tl.full([static.chunk, static.chunk], 0.0, tl.float32)
        for block in range(static.row_blocks):
            first = block * static.block_rows
            q = load_tokens(
                query, rows, length, head, first, static.heads, static.rows, static.block_rows,
                static,
            )  # fmt: skip
            k = load_tokens(
                key, rows, length, kv_head, first, static.kv_heads, static.rows,
                static.block_rows, static,
            )  # fmt: skip
            gates = load_gates(gate, rows, length, kv_head, first, static.block_rows, static)
            store_tokens(
                decayed_query, q * channel_start(gates, gamma_value, length, static), rows,
                length, head, first, static.heads, static.rows, static.block_rows, static,
            )  # fmt: skip
            if head % static.group == 0:
                store_tokens(
                    decayed_key, k * channel_end(gates, gamma_value, length, static), rows,
                    length, kv_head, first, static.kv_heads, static.rows, static.block_rows,
                    static,
                )  # fmt: skip
                total = tl.sum(gates.to(tl.float32), 0) + length.to(tl.float32) * gamma_value
                at = (batch.to(tl.int64) * static.chunks + chunk) * static.kv_heads + kv_head
                store_total(totals, total, at, first, static.block_rows, static)
            exponents = middle_exponents(gates, gamma_value, length, static)
            if fits_one_factor(exponents, static):
                q, k = anchored(q, k, exponents, static)
                product = tl.dot(q, tl.trans(k), input_precision=static.precision)
                acc += tl.where(time[:, None] >= time[None, :], product, 0.0)
            else:
                acc += _level_scores(q, k, gates, gamma_value, length, static)
        store_scores(scores, acc * static.scale, batch, chunk, head, static)


@triton_jit
def anchored(q: Tensor, k: Tensor, exponents: Tensor, static: LinearStatic):
    """Queries and keys, decayed between their token and the middle of the chunk."""
    upper = (tl.arange(0, static.chunk) >= static.chunk // 2)[:, None]
    forth = tl.where(upper, exponents, -exponents)
    return (q * tl.exp(forth)).to(q.dtype), (k * tl.exp(-forth)).to(k.dtype)


@triton_jit
def _level_scores(
    q: Tensor, k: Tensor, gates: Tensor, gamma: Scalar, length: Scalar, static: LinearStatic
):
    """The decayed products [t, s], by the blocks of 2, 4, 8, ... tokens that hold both."""
    own = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    time = tl.arange(0, static.chunk)
    acc = tl.where(time[:, None] == time[None, :], own[:, None], 0.0)
    for level in range(static.levels):
        factors = level_factors(gates, gamma, length, level, static)
        # The upper halves of blocks are rows of the products, the lower halves columns.
        upper = (((time >> level) & 1) == 1)[:, None]
        operand = (tl.where(upper, q, k) * factors).to(q.dtype)
        product = tl.dot(operand, tl.trans(operand), input_precision=static.precision)
        acc += tl.where(level_pairs(level, static), product, 0.0)
    return acc


@triton_jit
def output_kernel(
    segments: Pointer, query: Pointer, key: Pointer, value: Pointer, gate: Pointer,
    gamma: Pointer, scores: Pointer, entered: Pointer, out: Pointer, states: Pointer,
    static: LinearStatic,
):  # fmt: skip
    """Columns of the outputs of one segment, chunk by chunk with the state in registers."""
    program = tl.program_id(0)
    column = program % static.column_blocks * static.block_columns
    batch, segment, head = segment_position(program // static.column_blocks, static)
    token, length, sequence, first_chunk, flags = load_segment(segments, batch, segment, static)
    if length > 0:
        state = load_entered(
            entered, batch, segment, sequence, head, 0, column,
            static.block_rows, static.block_columns, static,
        )  # fmt: skip
        gamma_value = 0.0
        if static.gamma:
            gamma_value = load_gamma(gamma, batch, head, static)
        for chunk in range((length + static.chunk - 1) // static.chunk):
            rows, valid = chunk_rows(batch, token, length, chunk, static)
            if static.channel:
                state = _channel_step(
                    state, query, key, value, gate, scores, out, rows, valid, batch,
                     first_chunk + chunk, head, column, static,
                )  # fmt: skip
            else:
                state = _head_step(
                    state, query, key, value, gate, gamma_value, out, rows, valid, head, column,
                    static,
                )  # fmt: skip
        if (flags & static.flag_of_last) != 0:
            at = (batch.to(tl.int64) * static.sequences + sequence) * static.kv_heads + head
            store_state(
                states, state, at, 0, column, static.block_rows, static.block_columns, static
            )


@triton_jit
def _head_step(
    state: Tensor, query: Pointer, key: Pointer, value: Pointer, gate: Pointer, gamma: Scalar,
    out: Pointer, rows: Tensor, length: Scalar, head: Scalar, column: Scalar,
    static: LinearStatic,
):  # fmt: skip
    """Write the outputs of a chunk whose rows share a decay; the state after it."""
    k = load_tokens(
        key, rows, length, head, 0, static.kv_heads, static.rows, static.block_rows, static
    )
    v = load_tokens(
        value, rows, length, head, column, static.kv_heads, static.columns,
        static.block_columns, static,
    )  # fmt: skip
    time = tl.arange(0, static.chunk)
    gates = load_head_gates(gate, rows, length, head, static)
    if static.decays:
        pair = pairs(gates, gamma, length, static)
        start = head_start(gates, gamma, length, static)
    narrow = state.to(k.dtype)
    for i in range(static.group):
        own = head * static.group + i
        q = load_tokens(
            query, rows, length, own, 0, static.heads, static.rows, static.block_rows, static
        )
        weights = tl.dot(q, tl.trans(k), input_precision=static.precision)
        result = tl.dot(q, narrow, input_precision=static.precision)
        if static.decays:
            weights = weights * pair
            result = result * start[:, None]
        else:
            weights = tl.where(time[:, None] >= time[None, :], weights, 0.0)
        result = tl.dot(weights.to(v.dtype), v, result, input_precision=static.precision)
        store_tokens(
            out, result * static.scale, rows, length, own, column, static.heads,
            static.columns, static.block_columns, static,
        )  # fmt: skip
    if static.decays:
        state = state * tl.exp(head_total(gates, gamma, length, static))
        v = (v * head_end(gates, gamma, length, static)[:, None]).to(v.dtype)
    return tl.dot(tl.trans(k), v, state, input_precision=static.precision)


@triton_jit
def _channel_step(
    state: Tensor, query: Pointer, key: Pointer, value: Pointer, totals: Pointer,
    scores: Pointer, out: Pointer, rows: Tensor, length: Scalar, batch: Scalar, chunk: Scalar,
    head: Scalar, column: Scalar, static: LinearStatic,
):  # fmt: skip
    """Write the outputs of a chunk whose tokens have decayed already; the state after it."""
    v = load_tokens(
        value, rows, length, head, column, static.kv_heads, static.columns,
        static.block_columns, static,
    )  # fmt: skip
    narrow = state.to(v.dtype)
    for i in range(static.group):
        own = head * static.group + i
        q = load_tokens(
            query, rows, length, own, 0, static.heads, static.rows, static.block_rows, static
        )
        result = tl.dot(q, narrow, input_precision=static.precision) * static.scale
        weights = load_scores(scores, batch, chunk, own, static)
        result = tl.dot(weights, v, result, input_precision=static.precision)
        store_tokens(
            out, result, rows, length, own, column, static.heads, static.columns,
            static.block_columns, static,
        )  # fmt: skip
    k = load_tokens(
        key, rows, length, head, 0, static.kv_heads, static.rows, static.block_rows, static
    )
    at = (batch.to(tl.int64) * static.chunks + chunk) * static.kv_heads + head
    total = load_total(totals, at, 0, static.block_rows, static)
    state = state * tl.exp(total)[:, None]
    return tl.dot(tl.trans(k), v, state, input_precision=static.precision)


@triton_jit
def chunk_position(program: Scalar, heads: tl.constexpr, static: LinearStatic):
    """Batch row, chunk and head of a program."""
    head = program % heads
    chunk = program // heads % static.chunks
    return program // (heads * static.chunks), chunk, head


@triton_jit
def load_chunk(chunks: Pointer, batch: Scalar, chunk: Scalar, static: LinearStatic):
    """First token and length of a chunk."""
    at = chunks + chunk
    if static.packed:
        at += batch * (2 * static.chunks)
    return tl.load(at), tl.load(at + static.chunks)


@triton_jit
def _scores_at(batch: Scalar, chunk: Scalar, head: Scalar, static: LinearStatic):
    index = (batch.to(tl.int64) * static.chunks + chunk) * static.heads + head
    return index * (static.chunk * static.chunk)


@triton_jit
def load_scores(scores: Pointer, batch: Scalar, chunk: Scalar, head: Scalar, static: LinearStatic):
    """The scores [t, s] of a head in a chunk."""
    time = tl.arange(0, static.chunk)
    at = scores + _scores_at(batch, chunk, head, static)
    return tl.load(at + time[:, None] * static.chunk + time[None, :])


@triton_jit
def load_scores_transposed(
    scores: Pointer, batch: Scalar, chunk: Scalar, head: Scalar, static: LinearStatic
):
    """`load_scores`, [s, t]."""
    time = tl.arange(0, static.chunk)
    at = scores + _scores_at(batch, chunk, head, static)
    return tl.load(at + time[None, :] * static.chunk + time[:, None])


@triton_jit
def store_scores(
    scores: Pointer, values: Tensor, batch: Scalar, chunk: Scalar, head: Scalar,
    static: LinearStatic,
):  # fmt: skip
    """Write what `load_scores` would read."""
    time = tl.arange(0, static.chunk)
    at = scores + _scores_at(batch, chunk, head, static)
    tl.store(at + time[:, None] * static.chunk + time[None, :], values.to(scores.dtype.element_ty))
