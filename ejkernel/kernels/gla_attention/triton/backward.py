"""The backward kernels: gradients of values, and of queries, keys and gates, for every chunk.

Both are given the states before the chunks and the gradients of the states after them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.triton.bridge import (
    LaunchConfig,
    interpreted_after,
    launch,
    triton_jit,
)
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, Tensor
from ejkernel.kernels.gla_attention.inputs import Inputs
from ejkernel.kernels.gla_attention.triton.forward import (
    ChunkOperands,
    anchored,
    chunk_position,
    load_chunk,
    load_scores,
    load_scores_transposed,
    store_scores,
)
from ejkernel.kernels.gla_attention.triton.operands import (
    LinearStatic,
    TokenLists,
    operand_dtype,
)
from ejkernel.kernels.gla_attention.triton.states import decay_arrays, load_state, unused
from ejkernel.kernels.gla_attention.triton.tokens import (
    after_transposed,
    channel_end,
    channel_start,
    fits_one_factor,
    head_end,
    head_start,
    head_total,
    level_factors,
    level_pairs,
    level_pairs_transposed,
    level_table_transposed,
    load_gamma,
    load_gates,
    load_head_gates,
    load_tokens,
    middle_exponents,
    pairs,
    pairs_transposed,
    store_tokens,
    token_rows,
    up_to_transposed,
)
from ejkernel.ops.platform import Device

tl: Any = None

_OVERFLOW_ROWS = 16  # of a tile where decays overflow: that kernel needs many registers


class ChunkStates(NamedTuple):
    """The states [b, chunks, k, h, v] before the chunks, and the gradients of those after them."""

    before: jax.Array
    d_after: jax.Array


def value_gradient(
    operands: ChunkOperands,
    d_out: jax.Array,
    d_after: jax.Array,
    lists: TokenLists,
    static: LinearStatic,
    config: LaunchConfig,
    device: Device,
) -> jax.Array:
    """The gradient of the values."""
    query, key, decays, scores = operands
    shape = (static.batch, static.tokens, static.kv_heads, static.columns)
    (d_value,) = launch(
        value_kernel,
        [
            lists.chunks,
            query,
            key,
            interpreted_after(d_out, d_after),
            *decays,
            unused() if scores is None else scores,
            d_after,
        ],
        [jax.ShapeDtypeStruct(shape, d_out.dtype)],
        static,
        config._replace(programs=_programs(static) * static.column_blocks),
        device,
    )
    return d_value


def score_gradients(
    inputs: Inputs,
    d_out: jax.Array,
    lists: TokenLists,
    static: LinearStatic,
    config: LaunchConfig,
    device: Device,
) -> jax.Array:
    """The gradients [b, chunks, n, t, s] of the products of queries and keys, 0 where s > t."""
    shape = (static.batch, static.chunks, static.heads, static.chunk, static.chunk)
    (d_scores,) = launch(
        score_gradient_kernel,
        [lists.chunks, inputs.value, d_out],
        [jax.ShapeDtypeStruct(shape, operand_dtype(inputs.query.dtype))],
        static,
        config._replace(programs=static.batch * static.chunks * static.heads),
        device,
    )
    return d_scores


def key_gradients(
    inputs: Inputs,
    d_out: jax.Array,
    d_scores: jax.Array,
    states: ChunkStates,
    lists: TokenLists,
    static: LinearStatic,
    config: LaunchConfig,
    device: Device,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The gradients of queries, keys and log decays.

    The latter, in float32, are [b, s, k, h], or where the rows of a state share them
    [b, s, k, row blocks], partial sums. None: without a gate and a decay of heads.
    """
    batch, tokens, heads, rows = inputs.key.shape
    d_decays = (batch, tokens, heads, rows if static.channel else static.row_blocks)
    shapes = [
        jax.ShapeDtypeStruct(inputs.query.shape, inputs.query.dtype),
        jax.ShapeDtypeStruct(inputs.key.shape, inputs.key.dtype),
        jax.ShapeDtypeStruct(d_decays if static.decays else (16,), jnp.float32),
    ]
    operands = [
        lists.chunks,
        inputs.query,
        inputs.key,
        inputs.value,
        interpreted_after(d_out, d_scores),
        *decay_arrays(inputs),
        d_scores,
        *states,
    ]
    flags = (batch, static.chunks, heads, static.row_blocks) if static.channel else (16,)
    *gradients, overflows = launch(
        key_kernel,
        operands,
        [*shapes, jax.ShapeDtypeStruct(flags, jnp.int32)],
        static,
        config._replace(programs=_programs(static) * static.row_blocks),
        device,
    )
    if static.channel:
        narrow = dataclasses.replace(static, block_rows=_OVERFLOW_ROWS, flag_rows=static.block_rows)
        gradients = launch(
            overflowing_key_kernel,
            [*operands, overflows, *gradients],
            shapes,
            narrow,
            LaunchConfig(_programs(static) * narrow.row_blocks, 4, 1),
            device,
            aliases={len(operands) + 1 + i: i for i in range(len(shapes))},
        )
    d_query, d_key, d_gates = gradients
    return d_query, d_key, d_gates if static.decays else None


def _programs(static: LinearStatic) -> int:
    return static.batch * static.chunks * static.kv_heads


@triton_jit
def value_kernel(
    chunks: Pointer, query: Pointer, key: Pointer, d_out: Pointer, gate: Pointer, gamma: Pointer,
    scores: Pointer, d_after: Pointer, d_value: Pointer,
    static: LinearStatic,
):  # fmt: skip
    """Columns of the gradient of the values of one key head in one chunk."""
    program = tl.program_id(0)
    column = program % static.column_blocks * static.block_columns
    batch, chunk, head = chunk_position(program // static.column_blocks, static.kv_heads, static)
    token, length = load_chunk(chunks, batch, chunk, static)
    if length > 0:
        rows = token_rows(batch, token, static)
        time = tl.arange(0, static.chunk)
        gamma_value = 0.0
        if static.gamma:
            gamma_value = load_gamma(gamma, batch, head, static)
        state = (batch.to(tl.int64) * static.chunks + chunk) * static.kv_heads + head
        acc = tl.full([static.chunk, static.block_columns], 0.0, tl.float32)
        for block in range(static.row_blocks):
            first = block * static.block_rows
            k = load_tokens(
                key, rows, length, head, first, static.kv_heads, static.rows,
                static.block_rows, static,
            )  # fmt: skip
            after = load_state(
                d_after, state, first, column, static.block_rows, static.block_columns, static
            )
            acc = tl.dot(k, after, acc, input_precision=static.precision)
        if static.decays and not static.channel:
            gates = load_head_gates(gate, rows, length, head, static)
            acc = acc * head_end(gates, gamma_value, length, static)[:, None]
            pair = pairs_transposed(gates, gamma_value, length, static)
        for i in range(static.group):
            own = head * static.group + i
            if static.channel:
                weights = load_scores_transposed(scores, batch, chunk, own, static)
            else:
                products = _products(
                    key, query, rows, length, head, own, static.kv_heads, static.heads, static
                )
                if static.decays:
                    products = products * pair
                else:
                    products = tl.where(time[None, :] >= time[:, None], products, 0.0)
                weights = products * static.scale
            d_o = load_tokens(
                d_out, rows, length, own, column, static.heads, static.columns,
                static.block_columns, static,
            )  # fmt: skip
            acc = tl.dot(weights.to(d_o.dtype), d_o, acc, input_precision=static.precision)
        store_tokens(
            d_value, acc, rows, length, head, column, static.kv_heads, static.columns,
            static.block_columns, static,
        )  # fmt: skip


@triton_jit
def _products(
    left: Pointer, right: Pointer, rows: Tensor, length: Scalar, left_head: Scalar,
    right_head: Scalar, left_heads: tl.constexpr, right_heads: tl.constexpr, static: LinearStatic,
):  # fmt: skip
    """The products [chunk, chunk] of keys and queries, summed over the rows of a state."""
    acc = tl.full([static.chunk, static.chunk], 0.0, tl.float32)
    for block in range(static.row_blocks):
        first = block * static.block_rows
        x = load_tokens(
            left, rows, length, left_head, first, left_heads, static.rows, static.block_rows,
            static,
        )  # fmt: skip
        y = load_tokens(
            right, rows, length, right_head, first, right_heads, static.rows,
            static.block_rows, static,
        )  # fmt: skip
        acc = tl.dot(x, tl.trans(y), acc, input_precision=static.precision)
    return acc


@triton_jit
def score_gradient_kernel(
    chunks: Pointer, value: Pointer, d_out: Pointer, d_scores: Pointer, static: LinearStatic
):
    """The gradient of the scores of one head in one chunk."""
    batch, chunk, head = chunk_position(tl.program_id(0), static.heads, static)
    token, length = load_chunk(chunks, batch, chunk, static)
    if length > 0:
        rows = token_rows(batch, token, static)
        acc = tl.full([static.chunk, static.chunk], 0.0, tl.float32)
        for block in range(static.column_blocks):
            column = block * static.block_columns
            d_o = load_tokens(
                d_out, rows, length, head, column, static.heads, static.columns,
                static.block_columns, static,
            )  # fmt: skip
            v = load_tokens(
                value, rows, length, head // static.group, column, static.kv_heads,
                static.columns, static.block_columns, static,
            )  # fmt: skip
            acc = tl.dot(d_o, tl.trans(v), acc, input_precision=static.precision)
        time = tl.arange(0, static.chunk)
        acc = tl.where(time[:, None] >= time[None, :], acc * static.scale, 0.0)
        store_scores(d_scores, acc, batch, chunk, head, static)


@triton_jit
def key_kernel(
    chunks: Pointer, query: Pointer, key: Pointer, value: Pointer, d_out: Pointer, gate: Pointer,
    gamma: Pointer, d_scores: Pointer, before: Pointer, d_after: Pointer, d_query: Pointer,
    d_key: Pointer, d_gate: Pointer, overflows: Pointer,
    static: LinearStatic,
):  # fmt: skip
    """A block of the gradients of queries, keys and gates of one key head in one chunk.

    Blocks whose decays overflow as one factor are left to `overflowing_key_kernel`, and marked.
    """
    block = tl.program_id(0)
    batch, chunk, head, row_block = _block_indices(block, static)
    token, length = load_chunk(chunks, batch, chunk, static)
    if length > 0:
        rows = token_rows(batch, token, static)
        fits = True
        if static.channel:
            gates = load_gates(
                gate, rows, length, head, row_block * static.block_rows, static.block_rows, static
            )
            gamma_value = 0.0
            if static.gamma:
                gamma_value = load_gamma(gamma, batch, head, static)
            exponents = middle_exponents(gates, gamma_value, length, static)
            fits = fits_one_factor(exponents, static)
            tl.store(overflows + block, tl.where(fits, 0, 1))
        if fits:
            _write_gradients(
                query, key, value, d_out, gate, gamma, d_scores, before, d_after, d_query, d_key,
                d_gate, rows, length, batch, chunk, head, row_block, False, static,
            )  # fmt: skip
    elif static.channel:
        tl.store(overflows + block, 0)


@triton_jit
def overflowing_key_kernel(
    chunks: Pointer, query: Pointer, key: Pointer, value: Pointer, d_out: Pointer, gate: Pointer,
    gamma: Pointer, d_scores: Pointer, before: Pointer, d_after: Pointer, overflows: Pointer,
    _d_query: Pointer, _d_key: Pointer, _d_gate: Pointer, d_query: Pointer, d_key: Pointer,
    d_gate: Pointer,
    static: LinearStatic,
):  # fmt: skip
    """The blocks that `key_kernel` has left, in place; the arrays with `_` are the same ones."""
    batch, chunk, head, row_block = _block_indices(tl.program_id(0), static)
    index = (batch * static.chunks + chunk) * static.kv_heads + head
    flag = row_block * static.block_rows // static.flag_rows
    if tl.load(overflows + index * static.flags + flag) != 0:
        token, length = load_chunk(chunks, batch, chunk, static)
        rows = token_rows(batch, token, static)
        _write_gradients(
            query, key, value, d_out, gate, gamma, d_scores, before, d_after, d_query, d_key,
            d_gate, rows, length, batch, chunk, head, row_block, True, static,
        )  # fmt: skip


@triton_jit
def _block_indices(program: Scalar, static: LinearStatic):
    """Batch row, chunk, key head and block of rows of a program."""
    row_block = program % static.row_blocks
    batch, chunk, head = chunk_position(program // static.row_blocks, static.kv_heads, static)
    return batch, chunk, head, row_block


@triton_jit
def _write_gradients(
    query: Pointer, key: Pointer, value: Pointer, d_out: Pointer, gate: Pointer, gamma: Pointer,
    d_scores: Pointer, before: Pointer, d_after: Pointer, d_query: Pointer, d_key: Pointer,
    d_gate: Pointer, rows: Tensor, length: Scalar, batch: Scalar, chunk: Scalar, head: Scalar,
    row_block: Scalar, overflows: tl.constexpr, static: LinearStatic,
):  # fmt: skip
    """A block of gradients, from the state before the chunk, the one after it, and the scores."""
    row = row_block * static.block_rows
    gamma_value = 0.0
    if static.gamma:
        gamma_value = load_gamma(gamma, batch, head, static)
    state = (batch.to(tl.int64) * static.chunks + chunk) * static.kv_heads + head
    k = load_tokens(
        key, rows, length, head, row, static.kv_heads, static.rows, static.block_rows, static
    )
    d_k, kept = _from_after(value, before, d_after, rows, length, head, state, row, static)
    if static.channel:
        gates = load_gates(gate, rows, length, head, row, static.block_rows, static)
        total = tl.sum(gates.to(tl.float32), 0) + length.to(tl.float32) * gamma_value
        d_k *= channel_end(gates, gamma_value, length, static)
        d_g = _spread(after_transposed(tl.arange(0, static.chunk)), k * d_k, static)
        d_g += (kept * tl.exp(total))[None, :]
    else:
        gates = load_head_gates(gate, rows, length, head, static)
        d_g = tl.full([static.chunk], 0.0, tl.float32)
        if static.decays:
            d_k *= head_end(gates, gamma_value, length, static)[:, None]
            d_g = tl.sum(k * d_k, 1)
            later = after_transposed(tl.arange(0, static.chunk))
            d_g = tl.sum(tl.where(later, d_g[None, :], 0.0), 1)
            d_g += tl.sum(kept, 0) * tl.exp(head_total(gates, gamma_value, length, static))
    for i in range(static.group):
        own = head * static.group + i
        d_q = _from_out(d_out, before, rows, length, own, state, row, static)
        q = load_tokens(
            query, rows, length, own, row, static.heads, static.rows, static.block_rows, static
        )
        d_score = load_scores(d_scores, batch, chunk, own, static)
        transposed = load_scores_transposed(d_scores, batch, chunk, own, static)
        if static.channel:
            d_k, d_g, d_q = _channel_decay_gradients(
                d_k, d_g, d_q, q, k, d_score, transposed, gates, gamma_value, length, overflows,
                static,
            )  # fmt: skip
        else:
            d_k, d_g, d_q = _scalar_decay_gradients(
                d_k, d_g, d_q, q, k, d_score, transposed, gates, gamma_value, length, static
            )
        store_tokens(
            d_query, d_q, rows, length, own, row, static.heads, static.rows, static.block_rows,
            static,
        )  # fmt: skip
    if static.channel:
        store_tokens(
            d_gate, d_g, rows, length, head, row, static.kv_heads, static.rows,
            static.block_rows, static,
        )  # fmt: skip
    elif static.decays:
        at = d_gate + (rows * static.kv_heads + head) * static.row_blocks + row_block
        tl.store(at, d_g, mask=tl.arange(0, static.chunk) < length)
    store_tokens(
        d_key, d_k, rows, length, head, row, static.kv_heads, static.rows, static.block_rows,
        static,
    )  # fmt: skip


@triton_jit
def _from_after(
    value: Pointer, before: Pointer, d_after: Pointer, rows: Tensor, length: Scalar,
    head: Scalar, state: Scalar, row: Scalar, static: LinearStatic,
):  # fmt: skip
    """From the gradient of the state after the chunk: that of the keys, and of its decay.

    The keys' [chunk, block_rows] before their decay to the end, the state's [block_rows].
    """
    d_k = tl.full([static.chunk, static.block_rows], 0.0, tl.float32)
    kept = tl.full([static.block_rows], 0.0, tl.float32)
    for block in range(static.column_blocks):
        column = block * static.block_columns
        v = load_tokens(
            value, rows, length, head, column, static.kv_heads, static.columns,
            static.block_columns, static,
        )  # fmt: skip
        after = load_state(
            d_after, state, row, column, static.block_rows, static.block_columns, static
        )
        if static.decays:
            entered = load_state(
                before, state, row, column, static.block_rows, static.block_columns, static
            )
            kept += tl.sum(entered.to(tl.float32) * after.to(tl.float32), 1)
        d_k = tl.dot(v, tl.trans(after), d_k, input_precision=static.precision)
    return d_k, kept


@triton_jit
def _from_out(
    d_out: Pointer, before: Pointer, rows: Tensor, length: Scalar, own: Scalar, state: Scalar,
    row: Scalar, static: LinearStatic,
):  # fmt: skip
    """The gradient of the queries of a head that read the state before the chunk.

    [chunk, block_rows], before their decay from the start.
    """
    d_q = tl.full([static.chunk, static.block_rows], 0.0, tl.float32)
    for block in range(static.column_blocks):
        column = block * static.block_columns
        d_o = load_tokens(
            d_out, rows, length, own, column, static.heads, static.columns,
            static.block_columns, static,
        )  # fmt: skip
        entered = load_state(
            before, state, row, column, static.block_rows, static.block_columns, static
        )
        d_q = tl.dot(d_o, tl.trans(entered), d_q, input_precision=static.precision)
    return d_q


@triton_jit
def _scalar_decay_gradients(
    d_k: Tensor, d_g: Tensor, d_q: Tensor, q: Tensor, k: Tensor, d_score: Tensor,
    d_score_transposed: Tensor, gates: Tensor, gamma: Scalar, length: Scalar,
    static: LinearStatic,
):  # fmt: skip
    """Gradients of keys, gates and queries with what a head adds; its rows share a decay."""
    if static.decays:
        time = tl.arange(0, static.chunk)
        decayed = d_score * pairs(gates, gamma, length, static)
        d_q = d_q * (head_start(gates, gamma, length, static) * static.scale)[:, None]
        # A gate r counts for the pairs s < r <= t.
        inside = decayed * tl.dot(q, tl.trans(k), input_precision=static.precision)
        inside = tl.cumsum(inside, 0, reverse=True)
        inside = tl.sum(tl.where(time[None, :] < time[:, None], inside, 0.0), 1)
        read = tl.sum(q * d_q, 1)
        read = tl.sum(tl.where(up_to_transposed(time), read[None, :], 0.0), 1)
        d_g += inside + read
        d_score = decayed.to(k.dtype)
        decayed = d_score_transposed * pairs_transposed(gates, gamma, length, static)
        d_score_transposed = decayed.to(k.dtype)
    else:
        d_q = d_q * static.scale
    d_q = tl.dot(d_score, k, d_q, input_precision=static.precision)
    d_k = tl.dot(d_score_transposed, q, d_k, input_precision=static.precision)
    return d_k, d_g, d_q


@triton_jit
def _channel_decay_gradients(
    d_k: Tensor, d_g: Tensor, d_q: Tensor, q: Tensor, k: Tensor, d_score: Tensor,
    d_score_transposed: Tensor, gates: Tensor, gamma: Scalar, length: Scalar,
    overflows: tl.constexpr, static: LinearStatic,
):  # fmt: skip
    """`_scalar_decay_gradients` for gates of every row of a state."""
    d_q *= channel_start(gates, gamma, length, static) * static.scale
    d_g += _spread(up_to_transposed(tl.arange(0, static.chunk)), q * d_q, static)
    if overflows:
        d_q, d_k, d_g = _level_gradients(
            d_q, d_k, d_g, q, k, d_score, d_score_transposed, gates, gamma, length, static
        )
    else:
        d_q, d_k, d_g = _anchored_gradients(
            d_q, d_k, d_g, q, k, d_score, d_score_transposed, gates, gamma, length, static
        )
    return d_k, d_g, d_q


@triton_jit
def _anchored_gradients(
    d_q: Tensor, d_k: Tensor, d_g: Tensor, q: Tensor, k: Tensor, d_scores: Tensor,
    d_scores_transposed: Tensor, gates: Tensor, gamma: Scalar, length: Scalar,
    static: LinearStatic,
):  # fmt: skip
    """The gradients of queries, keys and gates with those of the pairs of a chunk.

    A gate r counts for the pairs s < r <= t: those with r <= t without those with r <= s. Rows and
    columns sum the same products of rounded numbers, so that the others cancel.
    """
    exponents = middle_exponents(gates, gamma, length, static)
    decayed_q, decayed_k = anchored(q, k, exponents, static)
    upper = (tl.arange(0, static.chunk) >= static.chunk // 2)[:, None]
    forth = tl.where(upper, exponents, -exponents)
    of_q = tl.dot(d_scores, decayed_k, input_precision=static.precision)
    inside = decayed_q * of_q
    d_q += of_q * tl.exp(forth)
    of_k = tl.dot(d_scores_transposed, decayed_q, input_precision=static.precision)
    inside -= decayed_k * of_k
    d_k += of_k * tl.exp(-forth)
    return (
        d_q,
        d_k,
        d_g + _spread_exactly(up_to_transposed(tl.arange(0, static.chunk)), inside, static),
    )


@triton_jit
def _level_gradients(
    d_q: Tensor, d_k: Tensor, d_g: Tensor, q: Tensor, k: Tensor, d_scores: Tensor,
    d_scores_transposed: Tensor, gates: Tensor, gamma: Scalar, length: Scalar,
    static: LinearStatic,
):  # fmt: skip
    """`_anchored_gradients`, by the blocks of 2, 4, 8, ... tokens that hold both of a pair."""
    time = tl.arange(0, static.chunk)
    zero = tl.zeros_like(d_scores)
    diagonal = tl.where(time[:, None] == time[None, :], d_scores, zero).to(tl.float32)
    diagonal = tl.sum(diagonal, 1)[:, None]
    d_q += diagonal * k
    d_k += diagonal * q
    for level in range(static.levels):
        factors = level_factors(gates, gamma, length, level, static)
        # The upper halves of blocks are rows of the products, the lower halves columns.
        upper = (((time >> level) & 1) == 1)[:, None]
        operand = (tl.where(upper, q, k) * factors).to(k.dtype)
        nothing = tl.zeros_like(operand)
        of_q = tl.dot(
            tl.where(level_pairs(level, static), d_scores, zero),
            tl.where(upper, nothing, operand),
            input_precision=static.precision,
        )
        of_k = tl.dot(
            tl.where(level_pairs_transposed(level, static), d_scores_transposed, zero),
            tl.where(upper, operand, nothing),
            input_precision=static.precision,
        )
        d_q += of_q * factors
        d_k += of_k * factors
        inside = operand * (of_q + of_k)
        d_g += _spread(level_table_transposed(level, static), inside, static)
    return d_q, d_k, d_g


@triton_jit
def _spread_exactly(table: Tensor, x: Tensor, static: LinearStatic):
    """`_spread` where terms cancel."""
    if static.narrow_spread:
        table = table.to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        acc = tl.dot(table, high)
        return tl.dot(table, (x - high.to(tl.float32)).to(tl.bfloat16), acc)
    return tl.dot(table.to(tl.float32), x, input_precision=static.pair_precision)


@triton_jit
def _spread(table: Tensor, x: Tensor, static: LinearStatic):
    """`table @ x` [r, d]: the gradient of each gate from those of the sums [t, d] that it is in."""
    if static.narrow_spread:
        return tl.dot(table.to(tl.bfloat16), x.to(tl.bfloat16))
    return tl.dot(table.to(tl.float32), x, input_precision=static.spread_precision)
