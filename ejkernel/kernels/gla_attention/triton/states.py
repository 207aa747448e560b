"""The states between chunks: a recurrence over the chunks of a segment, a scan over segments.

The recurrence adds the tokens of a chunk to a tile of the state: keys and values forward in time,
or queries and gradients of outputs backward, which gives the gradients of the states.
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
from ejkernel.kernels.gla_attention.triton.operands import (
    LinearStatic,
    TokenLists,
    operand_dtype,
)
from ejkernel.kernels.gla_attention.triton.tokens import (
    chunk_rows,
    head_end,
    head_start,
    head_total,
    load_gamma,
    load_head_gates,
    load_tokens,
    load_transposed,
)
from ejkernel.ops.platform import Device

tl: Any = None

_SCAN_ROWS, _SCAN_COLUMNS = 16, 64  # the tile of a program of the scan


class Decays(NamedTuple):
    """What makes a state decay, as kernels take it.

    Attributes:
        gate: [b, s, k, 1], or where every row of a state has one, the log decays [b, chunks, k, h]
            over chunks; else unused.
        gamma: [b, k], or unused.
    """

    gate: jax.Array
    gamma: jax.Array


def states_before_segments(
    added: tuple[jax.Array, jax.Array],
    decays: Decays,
    first: jax.Array | None,
    lists: TokenLists,
    static: LinearStatic,
    config: LaunchConfig,
    device: Device,
) -> jax.Array | None:
    """The states [b, segments, k, h, v] before each segment, in float32.

    `added` are keys and values, or queries and gradients of the outputs, where every row of a state
    has a gate decayed to the end and from the start of their chunk. `first` are the states
    [b, m, k, h, v] before the first chunk of every sequence: the results, if there is one segment.
    """
    static = dataclasses.replace(static, initial=first is not None)
    if not static.segmented:
        return first
    from_zero = dataclasses.replace(static, from_zero=True)
    shape = (static.batch, static.segments, static.kv_heads, static.rows, static.columns)
    states, totals = launch(
        recurrence_kernel,
        [lists.segments, *added, *decays, unused()],
        [
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct((*shape[:3], static.rows if static.channel else 1), jnp.float32),
        ],
        from_zero,
        config._replace(programs=_recurrence_programs(static)),
        device,
    )
    tile = dataclasses.replace(
        static,
        block_rows=min(_SCAN_ROWS, static.block_rows),
        block_columns=min(_SCAN_COLUMNS, static.block_columns),
    )
    programs = static.batch * static.kv_heads * tile.row_blocks * tile.column_blocks
    (entered,) = launch(
        scan_kernel,
        [lists.segments, states, totals, unused() if first is None else first],
        [jax.ShapeDtypeStruct(shape, jnp.float32)],
        tile,
        LaunchConfig(programs, 4, 3),
        device,
    )
    return entered


def states_of_chunks(
    added: tuple[jax.Array, jax.Array],
    decays: Decays,
    entered: jax.Array | None,
    lists: TokenLists,
    static: LinearStatic,
    config: LaunchConfig,
    device: Device,
) -> tuple[jax.Array, jax.Array]:
    """The states [b, chunks, k, h, v] before each chunk of the recurrence, and those after it.

    The former are in `operand_dtype` of what is added; the latter, [b, m, k, h, v] in float32, are
    written only if `static.last`, and only for sequences with tokens.
    """
    static = dataclasses.replace(static, initial=entered is not None)
    x, y = added
    if entered is not None:
        x = interpreted_after(x, entered)
    state = (static.kv_heads, static.rows, static.columns)
    states, last = launch(
        recurrence_kernel,
        [lists.segments, x, y, *decays, unused() if entered is None else entered],
        [
            jax.ShapeDtypeStruct((static.batch, static.chunks, *state), operand_dtype(x.dtype)),
            jax.ShapeDtypeStruct(
                (static.batch, static.sequences, *state) if static.last else (16,), jnp.float32
            ),
        ],
        static,
        config._replace(programs=_recurrence_programs(static)),
        device,
    )
    return states, last


def unused() -> jax.Array:
    """In place of an array that a kernel does not read."""
    return jnp.zeros((16,), jnp.float32)


def decay_arrays(inputs: Inputs) -> Decays:
    """Gates of tokens and decays of heads."""
    return Decays(*(unused() if x is None else x for x in (inputs.gate, inputs.g_gamma)))


def _recurrence_programs(static: LinearStatic) -> int:
    tiles = static.row_blocks * static.column_blocks
    return static.batch * static.segments * static.kv_heads * tiles


@triton_jit
def recurrence_kernel(
    segments: Pointer, x: Pointer, y: Pointer, gate: Pointer, gamma: Pointer, entered: Pointer,
    states: Pointer, last: Pointer,
    static: LinearStatic,
):  # fmt: skip
    """A tile of the state over the chunks of one segment.

    With `from_zero`: `states` of segments and their log decays in `last`.
    """
    program = tl.program_id(0)
    column = program % static.column_blocks * static.block_columns
    row = program // static.column_blocks % static.row_blocks * static.block_rows
    program = program // (static.column_blocks * static.row_blocks)
    batch, segment, head = segment_position(program, static)
    token, length, sequence, first_chunk, flags = load_segment(segments, batch, segment, static)

    wanted = length > 0
    if static.from_zero:  # the scan does not continue after the last segment of a sequence
        wanted = wanted & ((flags & static.flag_of_last) == 0)
    if wanted:
        if static.from_zero:
            state = tl.full([static.block_rows, static.block_columns], 0.0, tl.float32)
        else:
            state = load_entered(
                entered, batch, segment, sequence, head, row, column,
                static.block_rows, static.block_columns, static,
            )  # fmt: skip
        log_total = tl.full([static.block_rows], 0.0, tl.float32)
        gamma_value = 0.0
        if static.gamma:
            gamma_value = load_gamma(gamma, batch, head, static)
        count = (length + static.chunk - 1) // static.chunk
        for i in range(count):
            chunk = i
            if static.backward_in_time:
                chunk = count - 1 - i
            rows, valid = chunk_rows(batch, token, length, chunk, static)
            at = (batch.to(tl.int64) * static.chunks + first_chunk + chunk) * static.kv_heads + head
            if not static.from_zero:
                store_state(
                    states, state, at, row, column, static.block_rows, static.block_columns,
                    static,
                )  # fmt: skip
            state, log_decay = _advanced(
                state, x, y, gate, gamma_value, rows, valid, at, head, row, column, static
            )
            log_total += log_decay
        if static.from_zero:
            at = (batch.to(tl.int64) * static.segments + segment) * static.kv_heads + head
            store_state(
                states, state, at, row, column, static.block_rows, static.block_columns, static
            )
            if column == 0:
                store_total(last, log_total, at, row, static.block_rows, static)
        elif static.last:
            at = (batch.to(tl.int64) * static.sequences + sequence) * static.kv_heads + head
            if (flags & static.flag_of_last) != 0:
                store_state(
                    last, state, at, row, column, static.block_rows, static.block_columns, static
                )


@triton_jit
def _advanced(
    state: Tensor, x: Pointer, y: Pointer, gate: Pointer, gamma: Scalar, rows: Tensor,
    length: Scalar, chunk: Scalar, head: Scalar, row: Scalar, column: Scalar,
    static: LinearStatic,
):  # fmt: skip
    """A tile of the state after a chunk, and the log decays [block_rows] over it."""
    if static.channel:  # `x` has decayed already
        log_decay = load_total(gate, chunk, row, static.block_rows, static)
    else:
        gates = load_head_gates(gate, rows, length, head, static)
        total = head_total(gates, gamma, length, static)
        log_decay = tl.full([static.block_rows], 0.0, tl.float32) + total
        if static.backward_in_time:
            factor = head_start(gates, gamma, length, static)
        else:
            factor = head_end(gates, gamma, length, static)
    if static.decays:
        state = state * tl.exp(log_decay)[:, None]
    for i in range(static.added_group):
        own = head * static.added_group + i
        left = load_transposed(
            x, rows, length, own, row, static.added_heads, static.rows, static.block_rows, static
        )
        right = load_tokens(
            y, rows, length, own, column,
            static.added_heads, static.columns, static.block_columns, static,
        )  # fmt: skip
        if static.decays and not static.channel:
            right = (right * factor[:, None]).to(right.dtype)
        product = tl.dot(left, right, input_precision=static.precision)
        state += product * static.added_scale
    return state, log_decay


@triton_jit
def scan_kernel(
    segments: Pointer, states: Pointer, totals: Pointer, first: Pointer, entered: Pointer,
    static: LinearStatic,
):  # fmt: skip
    """A tile of the state over all segments of a batch row: what each of them begins with."""
    program = tl.program_id(0)
    column = program % static.column_blocks * static.block_columns
    row = program // static.column_blocks % static.row_blocks * static.block_rows
    program = program // (static.column_blocks * static.row_blocks)
    head = program % static.kv_heads
    batch = program // static.kv_heads
    state = tl.full([static.block_rows, static.block_columns], 0.0, tl.float32)
    for i in range(static.segments):
        segment = i
        if static.backward_in_time:
            segment = static.segments - 1 - i
        _, length, sequence, _, flags = load_segment(segments, batch, segment, static)
        begins = (flags & static.flag_of_first) != 0
        if static.initial:
            at = (batch.to(tl.int64) * static.sequences + sequence) * static.kv_heads + head
            given = load_state(
                first, at, row, column, static.block_rows, static.block_columns, static
            ).to(tl.float32)
        else:
            given = tl.full([static.block_rows, static.block_columns], 0.0, tl.float32)
        state = tl.where(begins, given, state)
        at = (batch.to(tl.int64) * static.segments + segment) * static.kv_heads + head
        store_state(
            entered, state, at, row, column, static.block_rows, static.block_columns, static
        )
        local = load_state(states, at, row, column, static.block_rows, static.block_columns, static)
        local = (
            state * tl.exp(load_total(totals, at, row, static.block_rows, static))[:, None] + local
        )
        # After the last segment of a sequence, and where there is none, nothing was written.
        continues = (length > 0) & ((flags & static.flag_of_last) == 0)
        state = tl.where(continues, local, state)


@triton_jit
def segment_position(program: Scalar, static: LinearStatic):
    """Batch row, segment and key head of a program."""
    head = program % static.kv_heads
    segment = program // static.kv_heads % static.segments
    return program // (static.kv_heads * static.segments), segment, head


@triton_jit
def load_segment(segments: Pointer, batch: Scalar, segment: Scalar, static: LinearStatic):
    """First token, length, sequence, first chunk and flags of a segment."""
    at = segments + segment
    if static.packed:
        at += batch * (5 * static.segments)
    token = tl.load(at)
    length = tl.load(at + static.segments)
    sequence = tl.load(at + 2 * static.segments)
    first_chunk = tl.load(at + 3 * static.segments)
    flags = tl.load(at + 4 * static.segments)
    return token, length, sequence, first_chunk, flags


@triton_jit
def load_entered(
    entered: Pointer, batch: Scalar, segment: Scalar, sequence: Scalar, head: Scalar, row: Scalar,
    column: Scalar, block_rows: tl.constexpr, block_columns: tl.constexpr, static: LinearStatic,
):  # fmt: skip
    """A tile of the state that the recurrence over a segment begins with."""
    if not static.initial:
        return tl.full([block_rows, block_columns], 0.0, tl.float32)
    if static.segmented:
        at = batch.to(tl.int64) * static.segments + segment
    else:
        at = batch.to(tl.int64) * static.sequences + sequence
    at = at * static.kv_heads + head
    state = load_state(entered, at, row, column, block_rows, block_columns, static)
    return state.to(tl.float32)


@triton_jit
def load_state(
    states: Pointer, index: Scalar, row: Scalar, column: Scalar,
    block_rows: tl.constexpr, block_columns: tl.constexpr, static: LinearStatic,
):  # fmt: skip
    """A tile of state number `index`; 0 past its end."""
    rows = row + tl.arange(0, block_rows)
    columns = column + tl.arange(0, block_columns)
    at = states + index * (static.rows * static.columns)
    valid = (rows < static.rows)[:, None] & (columns < static.columns)[None, :]
    return tl.load(at + rows[:, None] * static.columns + columns[None, :], mask=valid, other=0.0)


@triton_jit
def store_state(
    states: Pointer, state: Tensor, index: Scalar, row: Scalar, column: Scalar,
    block_rows: tl.constexpr, block_columns: tl.constexpr, static: LinearStatic,
):  # fmt: skip
    """Write what `load_state` would read."""
    rows = row + tl.arange(0, block_rows)
    columns = column + tl.arange(0, block_columns)
    at = states + index * (static.rows * static.columns)
    valid = (rows < static.rows)[:, None] & (columns < static.columns)[None, :]
    tl.store(
        at + rows[:, None] * static.columns + columns[None, :],
        state.to(states.dtype.element_ty),
        mask=valid,
    )


@triton_jit
def load_total(
    totals: Pointer, index: Scalar, row: Scalar, block: tl.constexpr, static: LinearStatic
):
    """The log decays [block] of rows of state number `index`."""
    rows = row + tl.arange(0, block)
    if static.channel:
        return tl.load(totals + index * static.rows + rows, mask=rows < static.rows, other=0.0)
    return tl.load(totals + index + rows * 0)


@triton_jit
def store_total(
    totals: Pointer, values: Tensor, index: Scalar, row: Scalar, block: tl.constexpr,
    static: LinearStatic,
):  # fmt: skip
    """Write what `load_total` would read."""
    rows = row + tl.arange(0, block)
    if static.channel:
        tl.store(totals + index * static.rows + rows, values, mask=rows < static.rows)
    else:
        tl.store(totals + index + rows * 0, values, mask=rows == 0)
