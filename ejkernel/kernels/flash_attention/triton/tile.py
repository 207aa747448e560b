"""What a tile of logits holds: loads, logits, mask and dropout, for the kernels of both passes.

A tile is block_q queries against block_k keys, or transposed, keys first. `static` is a `Mode` of
triton_gpu_plan, known when a kernel is compiled: each branch on it costs nothing.
"""

# Annotations stay text: Triton reads them, and it may not be here.
from __future__ import annotations

from typing import Any

from ejkernel.kernels.common.triton.bridge import triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar
from ejkernel.kernels.flash_attention.triton.operands import Mode

tl: Any = None


@triton_jit
def load_rows(
    base,
    start,
    length: tl.constexpr,
    stride: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    edge: tl.constexpr,
):
    """[block, width] from row `start` of a matrix [length, dim], 0 beyond; `edge`: may pass it."""
    row = tl.arange(0, block)[:, None]
    column = tl.arange(0, width)[None, :]
    at = base + tl.cast(start, tl.int64) * stride + (row * stride + column)
    if edge:
        tile = tl.load(at, mask=(start + row < length) & (column < dim), other=0.0)
    elif dim != width:
        tile = tl.load(at, mask=column < dim, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton_jit
def store_rows(
    base,
    tile,
    start,
    length: tl.constexpr,
    stride: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Write [block, width] to row `start` of a matrix [length, dim], but for what lies beyond."""
    row = tl.arange(0, block)[:, None]
    column = tl.arange(0, width)[None, :]
    at = base + tl.cast(start, tl.int64) * stride + (row * stride + column)
    tl.store(at, tile.to(base.dtype.element_ty), mask=(start + row < length) & (column < dim))


@triton_jit
def load_numbers(
    base: Pointer,
    start: Scalar,
    length: tl.constexpr,
    block: tl.constexpr,
    other: tl.constexpr,
):
    """[block] from entry `start` of [length], `other` beyond."""
    index = start + tl.arange(0, block)
    return tl.load(base + index, mask=index < length, other=other)


@triton_jit
def places(static: Mode, t: tl.constexpr):
    """Where in its tile a query and a key stand, so that the two broadcast to the tile."""
    q = tl.arange(0, static.block_q)
    k = tl.arange(0, static.block_k)
    if t:
        q, k = q[None, :], k[:, None]
    else:
        q, k = q[:, None], k[None, :]
    return q, k


@triton_jit
def walk(line, batch, head, bounds, static: tl.constexpr):
    """Which blocks a line visits: the first, the first full one, the end of those, the end.

    In a range the full ones stand together, partial ones on both sides; a list begins with them.
    """
    lines: tl.constexpr = static.k_blocks if static.columns else static.q_blocks
    # Loaded even where they are known: the compiler spills when it knows how long a loop is.
    at = bounds + _list_of(line, lines, batch, head, static) * 4
    first = tl.load(at)
    full_first = tl.load(at + 1)
    full_end = tl.load(at + 2)
    end = tl.load(at + 3)
    return first, full_first, full_end, end


@triton_jit
def _list_of(line, lines: tl.constexpr, batch, head, static: tl.constexpr):
    """Which entry of the map a line has; an axis of size 1 serves all."""
    at = line
    if static.map_heads:
        at += head * lines
    if static.map_batched:
        at += batch * (lines * (static.heads if static.map_heads else 1))
    return tl.cast(at, tl.int64)


@triton_jit
def list_at(line, batch, head, index, static: tl.constexpr):
    """Where the list of a line begins."""
    lines: tl.constexpr = static.k_blocks if static.columns else static.q_blocks
    others: tl.constexpr = static.q_blocks if static.columns else static.k_blocks
    return index + _list_of(line, lines, batch, head, static) * others


@triton_jit
def block_at(step, full: tl.constexpr, first, full_first, full_end, listed, static: tl.constexpr):
    """The block that a line visits at a step of its full or of its partial ones."""
    if static.map_lists:
        block = tl.load(listed + (step if full else full_end + step))
    elif full:
        block = full_first + step
    else:
        left = full_first - first
        block = tl.where(step < left, first + step, full_end + step - left)
    return block


@triton_jit
def visible(
    q_start, k_start, batch, head, rows, columns, table, static: tl.constexpr, t: tl.constexpr
):
    """Which pairs of a tile the mask allows; `t`: transposed. Keys beyond the last one are none."""
    q, k = places(static, t)
    q_real = q + q_start < static.q_len
    k_real = k + k_start < static.kv_len
    if static.marks_batched:
        rows += tl.cast(batch, tl.int64) * (static.row_marks * static.q_len)
        columns += tl.cast(batch, tl.int64) * (static.column_marks * static.kv_len)
    seen = q_real & k_real
    clauses: tl.constexpr = static.clauses
    for clause in tl.static_range(clauses):
        allowed = _clause(clause, q_start, k_start, k, k_real, rows, columns, static, t)
        if clause == 0:
            some = allowed
        else:
            some = some | allowed
    if static.clauses > 0:
        seen = seen & some
    if static.table:
        # One pointer for the tile and small numbers for its elements: fewer registers.
        if static.table_batched:
            table += tl.cast(batch, tl.int64) * (
                static.table_heads * static.table_rows * static.table_width
            )
        if static.table_heads > 1:
            table += tl.cast(head, tl.int64) * (static.table_rows * static.table_width)
        if static.table_indexed:
            i = _row_marks(rows, static.row_marks - 1, q_start, static, t)
            j = _column_marks(columns, static.column_marks - 1, k_start, static, t)
            at = i * static.table_width + j
        else:
            row: tl.constexpr = static.table_width if static.table_rows > 1 else 0
            step: tl.constexpr = 1 if static.table_width > 1 else 0
            table += tl.cast(q_start, tl.int64) * row + k_start * step
            at = q * row + k * step
        seen = seen & (tl.load(table + at, mask=q_real & k_real, other=0) != 0)
    return seen


@triton_jit
def _clause(
    clause: tl.constexpr, q_start, k_start, k, k_real, rows, columns,
    static: tl.constexpr, t: tl.constexpr,
):  # fmt: skip
    """Which pairs one clause of the mask allows: bounds for the keys, and marks that must match."""
    # A function, since a constant that is named in a loop cannot change; the loop below names none.
    slot: tl.constexpr = clause * (static.has_low + static.has_high + static.matches)
    matches: tl.constexpr = static.matches
    allowed = k_real
    if static.has_low:
        low = _row_marks(rows, slot, q_start, static, t)
        allowed = allowed & (k + k_start >= low)
    if static.has_high:
        high = _row_marks(rows, slot + static.has_low, q_start, static, t)
        allowed = allowed & (k + k_start <= high)
    for match in tl.static_range(matches):
        q_mark = _row_marks(
            rows, slot + static.has_low + static.has_high + match, q_start, static, t
        )
        k_mark = _column_marks(columns, clause * matches + match, k_start, static, t)
        allowed = allowed & (q_mark == k_mark)
    return allowed


@triton_jit
def _row_marks(rows, slot: tl.constexpr, q_start, static: tl.constexpr, t: tl.constexpr):
    """Marks of the queries of a tile, so that they broadcast to it."""
    # Loaded before they get a second axis: else each thread may load them for all its elements.
    marks = load_numbers(rows + slot * static.q_len, q_start, static.q_len, static.block_q, 0)
    return marks[None, :] if t else marks[:, None]


@triton_jit
def _column_marks(columns, slot: tl.constexpr, k_start, static: tl.constexpr, t: tl.constexpr):
    """Marks of the keys of a tile, so that they broadcast to it."""
    marks = load_numbers(columns + slot * static.kv_len, k_start, static.kv_len, static.block_k, 0)
    return marks[:, None] if t else marks[None, :]


@triton_jit
def logits(
    products, q_start, k_start, batch, head, bias,
    edge: tl.constexpr, static: tl.constexpr, t: tl.constexpr,
):  # fmt: skip
    """Logits in base 2 of a tile, divided by `static.factor`; `edge`: the tile may pass the end.

    Without bias and soft cap these are the products as they come: the factor waits until exp2,
    where it costs nothing.
    """
    if not static.plain:
        products = products * static.scale
    if static.bias:
        products += _bias_tile(q_start, k_start, batch, head, bias, edge, static, t).to(tl.float32)
    if static.soft_cap > 0.0:
        products = products * (2.8853900817779268 / static.soft_cap)  # 2 log2(e) / cap
        # tanh(x) = 1 - 2 / (exp(2x) + 1): infinities on the way are harmless.
        products = 1.0 - 2.0 / (tl.exp2(products) + 1.0)
    return products


@triton_jit
def _bias_tile(
    q_start, k_start, batch, head, bias, edge: tl.constexpr, static: tl.constexpr, t: tl.constexpr
):
    q, k = places(static, t)
    if static.bias_batch > 1:
        bias += tl.cast(batch, tl.int64) * (
            static.bias_heads * static.bias_rows * static.bias_width
        )
    if static.bias_heads > 1:
        bias += tl.cast(head, tl.int64) * (static.bias_rows * static.bias_width)
    # An axis of size 1 is read once, and the tile takes its full shape by the sum.
    if static.bias_rows > 1 and static.bias_width > 1:
        bias += tl.cast(q_start, tl.int64) * static.bias_width + k_start
        at = q * static.bias_width + k
        if edge or static.ragged_queries:
            inside = (q + q_start < static.q_len) & (k + k_start < static.kv_len)
            tile = tl.load(bias + at, mask=inside, other=0.0)
        else:
            tile = tl.load(bias + at)
    elif static.bias_rows > 1:
        tile = load_numbers(bias, q_start, static.q_len, static.block_q, 0.0)
        tile = tile[None, :] if t else tile[:, None]
    elif static.bias_width > 1:
        tile = load_numbers(bias, k_start, static.kv_len, static.block_k, 0.0)
        tile = tile[:, None] if t else tile[None, :]
    else:
        tile = tl.load(bias)
    return tile


@triton_jit
def kept(q_start, k_start, batch, head, counters, static: tl.constexpr, t: tl.constexpr):
    """Which weights of a tile survive dropout: the bits of kernels/common/dropout.py."""
    q, k = places(static, t)
    q += q_start
    k += k_start
    seed = tl.load(counters).to(tl.uint32, bitcast=True)
    head_index = tl.load(counters + 1 + head).to(tl.uint32, bitcast=True)
    batch_index = tl.load(counters + 1 + static.heads + batch).to(tl.uint32, bitcast=True)
    q, k = q.to(tl.uint32, bitcast=True), k.to(tl.uint32, bitcast=True)
    first = _chain(_mix(seed), batch_index, head_index, q)
    second = _chain(_mix(seed ^ 0x5BD1E995), batch_index, head_index, q)
    x = first + k * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ second) * 0x846CA68B
    return (x ^ (x >> 16)) >= static.threshold


@triton_jit
def _chain(x, batch, head, row):
    return _mix(_mix(_mix(x + batch * 0x9E3779B9) + head * 0x9E3779B9) + row * 0x9E3779B9)


@triton_jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
