"""Device functions: the tokens of a chunk, and their decays, computed without division.

Indices count in time inside the chunk. Of a chunk with log decays `a`:

    start[t] = exp(a[0] + ... + a[t])          from the state before the chunk to token t
    end[t]   = exp(a[t + 1] + ... + a[last])   from token t to the state after the chunk
    pair[t, s] = exp(a[s + 1] + ... + a[t])    from token s to token t

Sums are matmuls by ones and zeros: no difference of sums loses digits where a gate is very small.
The decay of a head is the same at every token, so its sums are products by a count. Padding is
not counted: where states grow, its factors would overflow, and 0 * inf is NaN.

Where every row of a state has a gate, a pair decays by the product of two factors, one of each
token, up to the middle of the chunk and from there: `exp(e[t]) * exp(-e[s])`. Where that could
overflow, pairs are grouped by the block of 2, 4, 8, ... tokens whose middle lies between them, as
in `chunk_recurrence`: no factor is above 1 then where no gate is above 0.
"""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.common.triton.bridge import triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, Tensor
from ejkernel.kernels.gla_attention.triton.operands import LinearStatic

tl: Any = None


@triton_jit
def token_rows(batch: Scalar, token: Scalar, static: LinearStatic):
    """The index of every token of a chunk among those of all batch rows."""
    time = tl.arange(0, static.chunk)
    if static.reverse:
        position = token - time
    else:
        position = token + time
    return batch.to(tl.int64) * static.tokens + position


@triton_jit
def chunk_rows(batch: Scalar, token: Scalar, length: Scalar, chunk: Scalar, static: LinearStatic):
    """`token_rows` of a chunk of the segment that begins at `token`, and how many are valid."""
    offset = chunk * static.chunk
    valid = tl.minimum(length - offset, static.chunk)
    if static.reverse:
        rows = token_rows(batch, token - offset, static)
    else:
        rows = token_rows(batch, token + offset, static)
    return rows, valid


@triton_jit
def load_tokens(
    x: Pointer, rows: Tensor, length: Scalar, head: Scalar, first: Scalar,
    heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr, static: LinearStatic,
):  # fmt: skip
    """Columns of an array [b, s, heads, width] of the tokens of a chunk, [chunk, block]; else 0."""
    column = first + tl.arange(0, block)
    valid = (tl.arange(0, static.chunk) < length)[:, None]
    if width % block != 0:
        valid = valid & (column < width)[None, :]
    values = tl.load(
        x + (rows * heads + head)[:, None] * width + column[None, :], mask=valid, other=0.0
    )
    if static.widened:
        values = values.to(tl.float32)
    return values


@triton_jit
def load_transposed(
    x: Pointer, rows: Tensor, length: Scalar, head: Scalar, first: Scalar,
    heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr, static: LinearStatic,
):  # fmt: skip
    """`load_tokens`, [block, chunk]."""
    column = first + tl.arange(0, block)
    valid = (tl.arange(0, static.chunk) < length)[None, :]
    if width % block != 0:
        valid = valid & (column < width)[:, None]
    values = tl.load(
        x + (rows * heads + head)[None, :] * width + column[:, None], mask=valid, other=0.0
    )
    if static.widened:
        values = values.to(tl.float32)
    return values


@triton_jit
def store_tokens(
    x: Pointer, values: Tensor, rows: Tensor, length: Scalar, head: Scalar, first: Scalar,
    heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr, static: LinearStatic,
):  # fmt: skip
    """Write what `load_tokens` would read."""
    column = first + tl.arange(0, block)
    valid = (tl.arange(0, static.chunk) < length)[:, None]
    if width % block != 0:
        valid = valid & (column < width)[None, :]
    tl.store(
        x + (rows * heads + head)[:, None] * width + column[None, :],
        values.to(x.dtype.element_ty),
        mask=valid,
    )


@triton_jit
def load_gates(
    gate: Pointer, rows: Tensor, length: Scalar, head: Scalar, first: Scalar,
    block: tl.constexpr, static: LinearStatic,
):  # fmt: skip
    """Log decays of the rows of a state, [chunk, block], 0 where there is no token."""
    gates = load_tokens(
        gate, rows, length, head, first, static.kv_heads, static.rows, block, static
    )
    return _bounded(gates.to(gate.dtype.element_ty), static)


@triton_jit
def load_head_gates(
    gate: Pointer, rows: Tensor, length: Scalar, head: Scalar, static: LinearStatic
):
    """Log decays that all rows of a state share, [chunk]; 0 where there is no token or no gate."""
    if static.gate:
        valid = tl.arange(0, static.chunk) < length
        gates = tl.load(gate + rows * static.kv_heads + head, mask=valid, other=0.0)
        gates = _bounded(gates, static)
    else:
        gates = tl.full([static.chunk], 0.0, tl.float32)
    return gates


@triton_jit
def load_gamma(gamma: Pointer, batch: Scalar, head: Scalar, static: LinearStatic):
    """The log decay of a head."""
    value = tl.load(gamma + batch * static.kv_heads + head).to(tl.float32)
    return tl.maximum(value, static.min_log_decay, propagate_nan=tl.PropagateNan.ALL)


@triton_jit
def _bounded(gates: Tensor, static: LinearStatic):
    return tl.maximum(gates, static.min_log_decay, propagate_nan=tl.PropagateNan.ALL).to(
        gates.dtype
    )


@triton_jit
def sums(table: Tensor, gates: Tensor, static: LinearStatic):
    """`table @ gates`, in float32: `table` [chunk, chunk] is true where a gate is in a sum."""
    if static.split_gates:  # three bfloat16 numbers that add up to a float32 one
        table = table.to(tl.bfloat16)
        acc = tl.full([static.chunk, gates.shape[1]], 0.0, tl.float32)
        for _ in tl.static_range(3):
            part = gates.to(tl.bfloat16)
            acc = tl.dot(table, part, acc)
            gates = gates - part.to(tl.float32)
    else:
        acc = tl.dot(table.to(gates.dtype), gates, input_precision="ieee")
    return acc


@triton_jit
def up_to(time: Tensor):
    """[t, r]: gate r is in the sum from the start through token t."""
    return time[None, :] <= time[:, None]


@triton_jit
def up_to_transposed(time: Tensor):
    """`up_to`, [r, t]."""
    return time[:, None] <= time[None, :]


@triton_jit
def after(time: Tensor):
    """[t, r]: gate r is in the sum from token t to the end."""
    return time[None, :] > time[:, None]


@triton_jit
def after_transposed(time: Tensor):
    """`after`, [r, t]."""
    return time[:, None] > time[None, :]


@triton_jit
def count_to_end(length: Scalar, static: LinearStatic):
    """How many tokens come after each, [chunk]."""
    return tl.maximum(length - 1 - tl.arange(0, static.chunk), 0).to(tl.float32)


@triton_jit
def count_from_start(length: Scalar, static: LinearStatic):
    """How many tokens come up to each, with it, [chunk]."""
    return (_clamped(tl.arange(0, static.chunk), length, static) + 1).to(tl.float32)


@triton_jit
def _clamped(time: Tensor, length: Scalar, static: LinearStatic):
    """Indices that counts of tokens are made from, none above that of the last valid token."""
    if static.gamma:  # without it, the counts are multiplied by 0
        time = tl.minimum(time, length - 1)
    return time


@triton_jit
def head_start(gates: Tensor, gamma: Scalar, length: Scalar, static: LinearStatic):
    """`start` [chunk] where the rows of a state share their decay."""
    exponent = count_from_start(length, static) * gamma
    if static.gate:
        values = tl.where(up_to(tl.arange(0, static.chunk)), gates.to(tl.float32)[None, :], 0.0)
        exponent += tl.sum(values, 1)
    return tl.exp(exponent)


@triton_jit
def head_end(gates: Tensor, gamma: Scalar, length: Scalar, static: LinearStatic):
    """`end` [chunk] where the rows of a state share their decay."""
    exponent = count_to_end(length, static) * gamma
    if static.gate:
        values = tl.where(after(tl.arange(0, static.chunk)), gates.to(tl.float32)[None, :], 0.0)
        exponent += tl.sum(values, 1)
    return tl.exp(exponent)


@triton_jit
def head_total(gates: Tensor, gamma: Scalar, length: Scalar, static: LinearStatic):
    """The log decay over a chunk where the rows of a state share it."""
    return tl.sum(gates.to(tl.float32), 0) + length.to(tl.float32) * gamma


@triton_jit
def pairs(gates: Tensor, gamma: Scalar, length: Scalar, static: LinearStatic):
    """`pair` [t, s] of a head, 0 where s comes after t."""
    time = tl.arange(0, static.chunk)
    token = _clamped(time, length, static)
    exponent = (token[:, None] - token[None, :]).to(tl.float32) * gamma
    if static.gate:
        # [r, s]: only the gates after s
        later = tl.where(time[:, None] > time[None, :], gates[:, None], 0.0).to(gates.dtype)
        exponent += sums(up_to(time), later, static)
    return tl.where(time[:, None] >= time[None, :], tl.exp(exponent), 0.0)


@triton_jit
def pairs_transposed(gates: Tensor, gamma: Scalar, length: Scalar, static: LinearStatic):
    """`pair` [s, t]."""
    time = tl.arange(0, static.chunk)
    token = _clamped(time, length, static)
    exponent = (token[None, :] - token[:, None]).to(tl.float32) * gamma
    if static.gate:
        # [r, t]: only the gates up to t
        earlier = tl.where(time[:, None] <= time[None, :], gates[:, None], 0.0).to(gates.dtype)
        exponent += sums(after(time), earlier, static)
    return tl.where(time[None, :] >= time[:, None], tl.exp(exponent), 0.0)


@triton_jit
def middle_exponents(gates: Tensor, gamma: Scalar, length: Scalar, static: LinearStatic):
    """The log decays [chunk, block] between each token and the middle of the chunk."""
    return _level_exponents(gates, gamma, length, static.levels - 1, static)


@triton_jit
def level_factors(
    gates: Tensor, gamma: Scalar, length: Scalar, level: Scalar, static: LinearStatic
):
    """The decays [chunk, block] between each token and the middle of its block."""
    return tl.exp(_level_exponents(gates, gamma, length, level, static))


@triton_jit
def _level_exponents(
    gates: Tensor, gamma: Scalar, length: Scalar, level: Scalar, static: LinearStatic
):
    exponent = sums(level_table(level, static), gates, static)
    time = tl.arange(0, static.chunk)
    first = (time >> level) << level  # of the half of the block
    upper = ((time >> level) & 1) == 1
    last = (((time >> level) + 1) << level) - 1
    before, last = _clamped(first - 1, length, static), _clamped(last, length, static)
    time = _clamped(time, length, static)
    count = tl.where(upper, time - before, last - time).to(tl.float32)
    return exponent + (count * gamma)[:, None]


@triton_jit
def level_table(level: Scalar, static: LinearStatic):
    """[t, r]: gate r lies between token t and the middle of the block of 2 ** (level + 1) tokens.

    Tokens of its upper half sum from the middle through their own, those of its lower half after
    their own to the middle.
    """
    time = tl.arange(0, static.chunk)
    near = (time >> level)[:, None] == (time >> level)[None, :]
    upper = (((time >> level) & 1) == 1)[:, None]
    ahead = time[None, :] <= time[:, None]
    return near & (upper == ahead)


@triton_jit
def level_table_transposed(level: Scalar, static: LinearStatic):
    """`level_table`, [r, t]."""
    time = tl.arange(0, static.chunk)
    near = (time >> level)[:, None] == (time >> level)[None, :]
    upper = (((time >> level) & 1) == 1)[None, :]
    ahead = time[:, None] <= time[None, :]
    return near & (upper == ahead)


@triton_jit
def level_pairs(level: Scalar, static: LinearStatic):
    """[t, s]: t and s lie in the upper and the lower half of one block."""
    time = tl.arange(0, static.chunk)
    half = time >> level
    return ((half & 1) == 1)[:, None] & (half[:, None] == half[None, :] + 1)


@triton_jit
def level_pairs_transposed(level: Scalar, static: LinearStatic):
    """`level_pairs`, [s, t]."""
    time = tl.arange(0, static.chunk)
    half = time >> level
    return ((half & 1) == 1)[None, :] & (half[None, :] == half[:, None] + 1)


@triton_jit
def channel_start(gates: Tensor, gamma: Scalar, length: Scalar, static: LinearStatic):
    """`start` [chunk, block] of gates [chunk, block]."""
    exponent = sums(up_to(tl.arange(0, static.chunk)), gates, static)
    return tl.exp(exponent + (count_from_start(length, static) * gamma)[:, None])


@triton_jit
def channel_end(gates: Tensor, gamma: Scalar, length: Scalar, static: LinearStatic):
    """`end` [chunk, block] of gates [chunk, block]."""
    exponent = sums(after(tl.arange(0, static.chunk)), gates, static)
    return tl.exp(exponent + (count_to_end(length, static) * gamma)[:, None])


@triton_jit
def fits_one_factor(exponents: Tensor, static: LinearStatic):
    """Whether factors between tokens and the middle of the chunk do not overflow."""
    return tl.max(tl.max(tl.abs(exponents), 1), 0) <= static.max_exponent
