"""What the Triton kernels over pages do with one tile: loads, logits, softmax, results.

`static` is a `Mode` of triton_gpu_plan, known when a kernel is compiled: a branch on it is free.
"""

# Annotations stay text: Triton reads them, and it may not be here.
from __future__ import annotations

from typing import Any

from ejkernel.kernels.common.triton.bridge import triton_jit

tl: Any = None


@triton_jit
def block_range(block, tokens, length, kv_length, static: tl.constexpr):
    """The first tile of keys that a block of queries may see, and the end of them."""
    first = kv_length - length + block * tokens
    last = tl.minimum(first + tokens, kv_length) - 1
    stop = tl.maximum(last + static.block_k, 0) // static.block_k
    begin = 0
    if static.window > 0:
        begin = tl.maximum(first - static.window + 1, 0) // static.block_k
    return begin, stop


@triton_jit
def page_ids(pages, j, kv_length, static: tl.constexpr):
    """The page of a tile, the pages of its parts, or those of its positions; -1 past the length.

    Numbers where that can be: what is carried to the next step should not be a tensor, which the
    threads would have to exchange.
    """
    position = j * static.block_k
    if static.pages_of_tile == 0:
        position += tl.arange(0, static.block_k)
    a = tl.load(pages + position // static.page_size, mask=position < kv_length, other=-1)
    b, c, d = a, a, a
    if static.pages_of_tile > 1:
        at = pages + j * static.pages_of_tile
        b = tl.load(at + 1, mask=position + static.page_size < kv_length, other=-1)
    if static.pages_of_tile > 2:
        c = tl.load(at + 2, mask=position + 2 * static.page_size < kv_length, other=-1)
        d = tl.load(at + 3, mask=position + 3 * static.page_size < kv_length, other=-1)
    return a, b, c, d


@triton_jit
def _page_of_row(a, b, c, d, static: tl.constexpr):
    """The page of a tile, or of each of its positions."""
    row = tl.arange(0, static.block_k)
    if static.pages_of_tile == 2:
        a = tl.where(row < static.page_size, a, b)
    elif static.pages_of_tile == 4:
        a = tl.where(row < static.page_size, a, b)
        c = tl.where(row < 3 * static.page_size, c, d)
        a = tl.where(row < 2 * static.page_size, a, c)
    return a


@triton_jit
def load_queries(
    query, k_scale, batch, row, real, head, index, pairs: tl.constexpr, static: tl.constexpr
):  # fmt: skip
    """Queries of a block as the cache meets them, a row for each token and each head of a group.

    And what their products are multiplied with: a number, or one for each row. With `pairs` the
    even columns and the odd ones apart.
    """
    token = index // static.group
    at = (
        (batch * static.tokens + row + token) * static.heads
        + head * static.group
        + index % static.group
    )
    at = query + (tl.cast(at, tl.int64) * static.head_dim)[:, None]
    there = (token < real)[:, None]
    factor = tl.full(index.shape, static.scale, tl.float32)
    if static.k_scale:
        factor = factor * tl.load(k_scale + head)
    if pairs:
        column = 2 * tl.arange(0, static.head_width // 2)[None, :]
        mask = there & (column < static.head_dim)
        even = tl.load(at + column, mask=mask, other=0.0)
        odd = tl.load(at + column + 1, mask=mask, other=0.0)
        if static.operands == "half":
            power = tl.maximum(_power(even), _power(odd))
            factor = factor * power
            even = _scaled(even, power)
            odd = _scaled(odd, power)
        q = (even, odd)
    else:
        column = tl.arange(0, static.head_width)[None, :]
        q = tl.load(at + column, mask=there & (column < static.head_dim), other=0.0)
        if static.operands == "single":
            q = q.to(tl.float32)
        elif static.operands == "half":
            power = _power(q)
            factor = factor * power
            q = _scaled(q, power)
    return q, factor


@triton_jit
def _power(q):
    """A power of two for each row that brings it into the range of float16.

    The largest number of a row comes to lie between 1 and 2. What is then too small for float16 is
    below 2**-24 of it, far less than the rounding of the largest in the query's own dtype.
    """
    largest = tl.max(tl.abs(q.to(tl.float32)), 1)
    return tl.exp2(tl.floor(tl.log2(tl.maximum(largest, 1e-37))))


@triton_jit
def _scaled(q, power):
    return (q.to(tl.float32) / power[:, None]).to(tl.float16)


@triton_jit
def step(
    total, peak, mass, q, factor, keys, values, a, b, c, d, j, real, position, head, index,
    masked: tl.constexpr, pairs: tl.constexpr, static: tl.constexpr,
):  # fmt: skip
    """The softmax so far, with one more tile of keys; with `pairs` total and q are two tiles."""
    place = j * static.block_k + tl.arange(0, static.block_k)
    ids = _page_of_row(a, b, c, d, static)
    there = (ids >= 0) & (ids < static.pages) & (place < position + real)
    if static.window > 0:
        there = there & (place > position - static.window)
    slot = place % static.page_size
    if static.far:
        ids = tl.cast(ids, tl.int64)
    if pairs:
        even, odd = _load_pairs(
            keys, head * static.k_head, ids * (static.k_page // 2) + slot * (static.k_slot // 2),
            there, static.head_dim, static.head_width, static,
        )  # fmt: skip
        x = tl.dot(q[0], tl.trans(even))
        x = tl.dot(q[1], tl.trans(odd), x)
    else:
        k = _load_tile(
            keys + head * static.k_head, ids * static.k_page + slot * static.k_slot, there, masked,
            static.head_dim, static.head_width, static,
        ).to(q.dtype)  # fmt: skip
        x = tl.dot(q, tl.trans(k), input_precision=static.precision)
    if not static.plain:
        x = x * factor[:, None]
    if static.soft_cap > 0.0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1): infinities on the way are harmless.
        x = 1.0 - 2.0 / (tl.exp2(x * (2.8853900817779268 / static.soft_cap)) + 1.0)
    if masked:
        token = index // static.group
        own = tl.where(token < real, position + token, -1)[:, None]
        seen = (place[None, :] <= own) & there[None, :]
        if static.window > 0:
            seen = seen & (place[None, :] > own - static.window)
        x = tl.where(seen, x, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(x, 1) * static.factor)
    weights = tl.exp2(x * static.factor - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    mass = mass * shrink + tl.sum(weights, 1)
    if pairs:
        even, odd = _load_pairs(
            values, static.v_first + head * static.v_head,
            ids * (static.v_page // 2) + slot * (static.v_slot // 2), there,
            static.value_dim, static.value_width, static,
        )  # fmt: skip
        weights = weights.to(even.dtype)
        total = (
            tl.dot(weights, even, total[0] * shrink[:, None]),
            tl.dot(weights, odd, total[1] * shrink[:, None]),
        )
    else:
        v = _load_tile(
            values + static.v_first + head * static.v_head,
            ids * static.v_page + slot * static.v_slot, there, masked, static.value_dim,
            static.value_width, static,
        ).to(q.dtype)  # fmt: skip
        total = total * shrink[:, None]
        total = tl.dot(weights.to(v.dtype), v, total, input_precision=static.precision)
    return total, new_peak, mass


@triton_jit
def _load_tile(
    base, at, there, masked: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
    static: tl.constexpr,
):  # fmt: skip
    """[block_k, width] of keys or values at these places, 0 where they are not `there`."""
    column = tl.arange(0, width)[None, :]
    at = base + at[:, None] + column
    if masked and dim != width:
        x = tl.load(at, mask=there[:, None] & (column < dim), other=0.0)
    elif masked:
        x = tl.load(at, mask=there[:, None], other=0.0)
    elif dim != width:
        x = tl.load(at, mask=column < dim, other=0.0)
    else:
        x = tl.load(at)
    if static.bits:
        x = x.to(tl.int16)
        x = _from_e5m2(x << 8) if static.eight == "e5m2" else _from_e4m3(x)
    return x


@triton_jit
def _load_pairs(
    base, first, at, there, dim: tl.constexpr, width: tl.constexpr, static: tl.constexpr
):
    """[block_k, width / 2] of the even columns of 8 bits and of the odd ones, as float16.

    Two neighbours are read as one number of 16 bits, which the matrix units' own loads can
    transpose; bytes would have to be fetched one by one.
    """
    column = tl.arange(0, width // 2)[None, :]
    at = (base + first).to(tl.pointer_type(tl.int16), bitcast=True) + at[:, None] + column
    if dim != width:
        x = tl.load(at, mask=there[:, None] & (column < dim // 2), other=0)
    else:
        x = tl.load(at, mask=there[:, None], other=0)
    if static.assembly != "":
        # Two numbers at a time: four bytes in, the even ones and the odd ones out.
        even, odd = tl.inline_asm_elementwise(
            static.assembly, "=r,=r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif static.eight == "e5m2":
        even = _from_e5m2(x << 8)
        odd = _from_e5m2(x & -256)
    elif static.eight == "e4m3":
        even = _from_e4m3(x)
        odd = _from_e4m3(x >> 8)
    else:
        even = ((x << 8) >> 8).to(tl.float16)
        odd = (x >> 8).to(tl.float16)
    return even, odd


@triton_jit
def _from_e5m2(x):
    """The upper half of a float16."""
    return x.to(tl.int16).to(tl.float16, bitcast=True)


@triton_jit
def _from_e4m3(x):
    """The lower byte: a float16 with another bias of the exponent; its largest number is a NaN."""
    some = ((x & 0x7F) << 7) | ((x & 0x80) << 8)
    some = some.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return tl.where((x & 0x7F) == 0x7F, float("nan"), some)


@triton_jit
def finish(
    total, peak, mass, v_scale, sinks, out, lse, batch, row, real, head, index,
    static: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of the rows `index` of an item."""
    token = index // static.group
    query_head = head * static.group + index % static.group
    seen = mass > 0.0
    whole = mass
    if static.sinks:
        whole += tl.exp2(tl.load(sinks + query_head) * 1.4426950408889634 - peak)
    total = total / tl.where(seen, whole, 1.0)[:, None]
    if static.v_scale:
        total = total * tl.load(v_scale + head)
    at = tl.cast((batch * static.tokens + row + token) * static.heads + query_head, tl.int64)
    column = tl.arange(0, static.value_width)[None, :]
    mask = (token < real)[:, None] & (column < static.value_dim)
    at = out + at[:, None] * static.value_dim + column
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)
    natural = (peak + tl.log2(tl.where(seen, mass, 1.0))) * 0.6931471805599453
    at = lse + (batch * static.heads + query_head) * static.tokens + row + token
    tl.store(at, tl.where(seen, natural, float("-inf")), mask=token < real)


@triton_jit
def _clear(info, v_scale, sinks, out, lse, number, static: tl.constexpr):
    """The results of a token, if it stands behind those of all sequences of its row."""
    batch = number // static.tokens
    row = number - batch * static.tokens
    behind = 0
    for chunk in range(0, static.per_batch, static.search):
        index = chunk + tl.arange(0, static.search)
        at = info + batch * static.per_batch + index
        start = tl.load(at, mask=index < static.per_batch, other=0)
        length = tl.load(at + static.sequences, mask=index < static.per_batch, other=0)
        behind = tl.maximum(behind, tl.max(tl.where(length > 0, start + length, 0), 0))
    if row >= behind:
        index = tl.arange(0, static.narrow_rows)
        total = tl.full([static.narrow_rows, static.value_width], 0.0, tl.float32)
        nothing = tl.full([static.narrow_rows], 0.0, tl.float32)
        for head in range(static.kv_heads):
            finish(
                total,
                nothing,
                nothing,
                v_scale,
                sinks,
                out,
                lse,
                batch,
                row,
                1,
                head,
                index,
                static,
            )


@triton_jit
def combine(
    cut, parts, peaks, masses, info, v_scale, sinks, some_out, some_lse,
    out, lse,
    static: tl.constexpr,
):  # fmt: skip
    """Some rows of an item that several programs had a part of; it began in `program`.

    And zeros for queries of no sequence, where those are not items of the list: by programs of
    their own, at the end.
    """
    number = tl.program_id(0)
    program = number // static.combine_chunks
    if program < static.programs:
        _put_together(
            cut, parts, peaks, masses, v_scale, sinks, out, lse, program,
            number - program * static.combine_chunks, static,
        )  # fmt: skip
    elif static.wide_rows == 0:
        first = number - static.programs * static.combine_chunks
        for token in range(first, static.batch * static.tokens, static.combine_clear):
            _clear(info, v_scale, sinks, out, lse, token, static)


@triton_jit
def _put_together(
    cut, parts, peaks, masses, v_scale, sinks, out, lse, program, chunk, static: tl.constexpr
):
    """The rows of a chunk, and every so many further ones if the item has more."""
    size: tl.constexpr = static.combine_rows
    remaining = tl.load(cut + program * 8)
    batch = tl.load(cut + program * 8 + 1)
    row = tl.load(cut + program * 8 + 2)
    real = tl.load(cut + program * 8 + 3)
    head = tl.load(cut + program * 8 + 4)
    share = tl.load(cut + program * 8 + 5)
    end = tl.where(remaining > 0, real * static.group, 0)
    count = 1 + (remaining + share - 1) // tl.maximum(share, 1)
    if static.combine_chunks * size >= static.rows:  # no loop for what happens once at most
        if chunk * size < end:
            _put_rows_together(
                parts, peaks, masses, v_scale, sinks, out, lse,
                program, count, batch, row, real, head, chunk * size, static,
            )  # fmt: skip
    else:
        for first in range(chunk * size, end, static.combine_chunks * size):
            _put_rows_together(
                parts, peaks, masses, v_scale, sinks, out, lse,
                program, count, batch, row, real, head, first, static,
            )  # fmt: skip


@triton_jit
def _put_rows_together(
    parts, peaks, masses, v_scale, sinks, out, lse,
    program, count, batch, row, real, head, first,
    static: tl.constexpr,
):  # fmt: skip
    """The rows from `first` on, from the `count` parts of their item."""
    size: tl.constexpr = static.combine_rows
    index = first + tl.arange(0, size)
    total = tl.full([size, static.value_width], 0.0, tl.float32)
    peak = tl.full([size], -3.4028234663852886e38, tl.float32)
    mass = tl.full([size], 0.0, tl.float32)
    for begin in range(0, count, static.combine_parts):
        number = begin + tl.arange(0, static.combine_parts)
        # What began in a program lies behind what it had of an earlier item.
        place = 2 * (program + number) + (number == 0).to(tl.int32)
        at = place[:, None] * static.rows + index[None, :]
        there = (number < count)[:, None]
        column = tl.arange(0, static.value_width)[None, None, :]
        x = tl.load(
            parts + at[:, :, None] * static.value_width + column,
            mask=there[:, :, None],
            other=0.0,
        )
        some = tl.load(peaks + at, mask=there, other=-3.4028234663852886e38)
        amount = tl.load(masses + at, mask=there, other=0.0)
        new_peak = tl.maximum(peak, tl.max(some, 0))
        weight = tl.exp2(some - new_peak[None, :])
        shrink = tl.exp2(peak - new_peak)
        mass = mass * shrink + tl.sum(amount * weight, 0)
        total = total * shrink[:, None] + tl.sum(x * weight[:, :, None], 0)
        peak = new_peak
    finish(total, peak, mass, v_scale, sinks, out, lse, batch, row, real, head, index, static)
