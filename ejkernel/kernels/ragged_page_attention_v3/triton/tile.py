"""What the Triton kernels over pages do with one tile: loads, logits, softmax, results.

`mode` is a `Mode` of triton_gpu_plan, known when a kernel is compiled: a branch on it is free.
"""

# Annotations stay text: Triton reads them, and it may not be here.
from __future__ import annotations

from typing import Any

from ejkernel.kernels.common.triton.bridge import kernel

tl: Any = None


@kernel
def block_range(block, tokens, length, kv_length, mode: tl.constexpr):
    """The first tile of keys that a block of queries may see, and the end of them."""
    first = kv_length - length + block * tokens
    last = tl.minimum(first + tokens, kv_length) - 1
    stop = tl.maximum(last + mode.block_k, 0) // mode.block_k
    begin = 0
    if mode.window > 0:
        begin = tl.maximum(first - mode.window + 1, 0) // mode.block_k
    return begin, stop


@kernel
def page_ids(pages, j, kv_length, mode: tl.constexpr):
    """The page of a tile, the pages of its parts, or those of its positions; -1 past the length.

    Numbers where that can be: what is carried to the next step should not be a tensor, which the
    threads would have to exchange.
    """
    position = j * mode.block_k
    if mode.pages_of_tile == 0:
        position += tl.arange(0, mode.block_k)
    a = tl.load(pages + position // mode.page_size, mask=position < kv_length, other=-1)
    b, c, d = a, a, a
    if mode.pages_of_tile > 1:
        at = pages + j * mode.pages_of_tile
        b = tl.load(at + 1, mask=position + mode.page_size < kv_length, other=-1)
    if mode.pages_of_tile > 2:
        c = tl.load(at + 2, mask=position + 2 * mode.page_size < kv_length, other=-1)
        d = tl.load(at + 3, mask=position + 3 * mode.page_size < kv_length, other=-1)
    return a, b, c, d


@kernel
def _page_of_row(a, b, c, d, mode: tl.constexpr):
    """The page of a tile, or of each of its positions."""
    row = tl.arange(0, mode.block_k)
    if mode.pages_of_tile == 2:
        a = tl.where(row < mode.page_size, a, b)
    elif mode.pages_of_tile == 4:
        a = tl.where(row < mode.page_size, a, b)
        c = tl.where(row < 3 * mode.page_size, c, d)
        a = tl.where(row < 2 * mode.page_size, a, c)
    return a


@kernel
def load_queries(
    query, k_scale, batch, row, real, head, index, pairs: tl.constexpr, mode: tl.constexpr
):  # fmt: skip
    """Queries of a block as the cache meets them, a row for each token and each head of a group.

    And what their products are multiplied with: a number, or one for each row. With `pairs` the
    even columns and the odd ones apart.
    """
    token = index // mode.group
    at = (batch * mode.tokens + row + token) * mode.heads + head * mode.group + index % mode.group
    at = query + (tl.cast(at, tl.int64) * mode.head_dim)[:, None]
    there = (token < real)[:, None]
    factor = tl.full(index.shape, mode.scale, tl.float32)
    if mode.k_scale:
        factor = factor * tl.load(k_scale + head)
    if pairs:
        column = 2 * tl.arange(0, mode.head_width // 2)[None, :]
        mask = there & (column < mode.head_dim)
        even = tl.load(at + column, mask=mask, other=0.0)
        odd = tl.load(at + column + 1, mask=mask, other=0.0)
        if mode.operands == "half":
            power = tl.maximum(_power(even), _power(odd))
            factor = factor * power
            even = _scaled(even, power)
            odd = _scaled(odd, power)
        q = (even, odd)
    else:
        column = tl.arange(0, mode.head_width)[None, :]
        q = tl.load(at + column, mask=there & (column < mode.head_dim), other=0.0)
        if mode.operands == "single":
            q = q.to(tl.float32)
        elif mode.operands == "half":
            power = _power(q)
            factor = factor * power
            q = _scaled(q, power)
    return q, factor


@kernel
def _power(q):
    """A power of two for each row that brings it into the range of float16.

    The largest number of a row comes to lie between 1 and 2. What is then too small for float16 is
    below 2**-24 of it, far less than the rounding of the largest in the query's own dtype.
    """
    largest = tl.max(tl.abs(q.to(tl.float32)), 1)
    return tl.exp2(tl.floor(tl.log2(tl.maximum(largest, 1e-37))))


@kernel
def _scaled(q, power):
    return (q.to(tl.float32) / power[:, None]).to(tl.float16)


@kernel
def step(
    total, peak, mass, q, factor, keys, values, a, b, c, d, j, real, position, head, index,
    masked: tl.constexpr, pairs: tl.constexpr, mode: tl.constexpr,
):  # fmt: skip
    """The softmax so far, with one more tile of keys; with `pairs` total and q are two tiles."""
    place = j * mode.block_k + tl.arange(0, mode.block_k)
    ids = _page_of_row(a, b, c, d, mode)
    there = (ids >= 0) & (ids < mode.pages) & (place < position + real)
    if mode.window > 0:
        there = there & (place > position - mode.window)
    slot = place % mode.page_size
    if mode.far:
        ids = tl.cast(ids, tl.int64)
    if pairs:
        even, odd = _load_pairs(
            keys, head * mode.k_head, ids * (mode.k_page // 2) + slot * (mode.k_slot // 2), there,
            mode.head_dim, mode.head_width, mode,
        )  # fmt: skip
        x = tl.dot(q[0], tl.trans(even))
        x = tl.dot(q[1], tl.trans(odd), x)
    else:
        k = _load_tile(
            keys + head * mode.k_head, ids * mode.k_page + slot * mode.k_slot, there, masked,
            mode.head_dim, mode.head_width, mode,
        ).to(q.dtype)  # fmt: skip
        x = tl.dot(q, tl.trans(k), input_precision=mode.precision)
    if not mode.plain:
        x = x * factor[:, None]
    if mode.soft_cap > 0.0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1): infinities on the way are harmless.
        x = 1.0 - 2.0 / (tl.exp2(x * (2.8853900817779268 / mode.soft_cap)) + 1.0)
    if masked:
        token = index // mode.group
        own = tl.where(token < real, position + token, -1)[:, None]
        seen = (place[None, :] <= own) & there[None, :]
        if mode.window > 0:
            seen = seen & (place[None, :] > own - mode.window)
        x = tl.where(seen, x, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(x, 1) * mode.factor)
    weights = tl.exp2(x * mode.factor - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    mass = mass * shrink + tl.sum(weights, 1)
    if pairs:
        even, odd = _load_pairs(
            values, mode.v_first + head * mode.v_head,
            ids * (mode.v_page // 2) + slot * (mode.v_slot // 2), there,
            mode.value_dim, mode.value_width, mode,
        )  # fmt: skip
        weights = weights.to(even.dtype)
        total = (
            tl.dot(weights, even, total[0] * shrink[:, None]),
            tl.dot(weights, odd, total[1] * shrink[:, None]),
        )
    else:
        v = _load_tile(
            values + mode.v_first + head * mode.v_head, ids * mode.v_page + slot * mode.v_slot,
            there, masked, mode.value_dim, mode.value_width, mode,
        ).to(q.dtype)  # fmt: skip
        total = total * shrink[:, None]
        total = tl.dot(weights.to(v.dtype), v, total, input_precision=mode.precision)
    return total, new_peak, mass


@kernel
def _load_tile(
    base, at, there, masked: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
    mode: tl.constexpr,
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
    if mode.bits:
        x = x.to(tl.int16)
        x = _from_e5m2(x << 8) if mode.eight == "e5m2" else _from_e4m3(x)
    return x


@kernel
def _load_pairs(base, first, at, there, dim: tl.constexpr, width: tl.constexpr, mode: tl.constexpr):
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
    if mode.assembly != "":
        # Two numbers at a time: four bytes in, the even ones and the odd ones out.
        even, odd = tl.inline_asm_elementwise(
            mode.assembly, "=r,=r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif mode.eight == "e5m2":
        even = _from_e5m2(x << 8)
        odd = _from_e5m2(x & -256)
    elif mode.eight == "e4m3":
        even = _from_e4m3(x)
        odd = _from_e4m3(x >> 8)
    else:
        even = ((x << 8) >> 8).to(tl.float16)
        odd = (x >> 8).to(tl.float16)
    return even, odd


@kernel
def _from_e5m2(x):
    """The upper half of a float16."""
    return x.to(tl.int16).to(tl.float16, bitcast=True)


@kernel
def _from_e4m3(x):
    """The lower byte: a float16 with another bias of the exponent; its largest number is a NaN."""
    some = ((x & 0x7F) << 7) | ((x & 0x80) << 8)
    some = some.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return tl.where((x & 0x7F) == 0x7F, float("nan"), some)


@kernel
def finish(
    total, peak, mass, v_scale, sinks, out, lse, batch, row, real, head, index,
    mode: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of the rows `index` of an item."""
    token = index // mode.group
    query_head = head * mode.group + index % mode.group
    seen = mass > 0.0
    whole = mass
    if mode.sinks:
        whole += tl.exp2(tl.load(sinks + query_head) * 1.4426950408889634 - peak)
    total = total / tl.where(seen, whole, 1.0)[:, None]
    if mode.v_scale:
        total = total * tl.load(v_scale + head)
    at = tl.cast((batch * mode.tokens + row + token) * mode.heads + query_head, tl.int64)
    column = tl.arange(0, mode.value_width)[None, :]
    mask = (token < real)[:, None] & (column < mode.value_dim)
    at = out + at[:, None] * mode.value_dim + column
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)
    natural = (peak + tl.log2(tl.where(seen, mass, 1.0))) * 0.6931471805599453
    at = lse + (batch * mode.heads + query_head) * mode.tokens + row + token
    tl.store(at, tl.where(seen, natural, float("-inf")), mask=token < real)


@kernel
def _clear(info, v_scale, sinks, out, lse, number, mode: tl.constexpr):
    """The results of a token, if it stands behind those of all sequences of its row."""
    batch = number // mode.tokens
    row = number - batch * mode.tokens
    behind = 0
    for chunk in range(0, mode.per_batch, mode.search):
        index = chunk + tl.arange(0, mode.search)
        at = info + batch * mode.per_batch + index
        start = tl.load(at, mask=index < mode.per_batch, other=0)
        length = tl.load(at + mode.sequences, mask=index < mode.per_batch, other=0)
        behind = tl.maximum(behind, tl.max(tl.where(length > 0, start + length, 0), 0))
    if row >= behind:
        index = tl.arange(0, mode.narrow_rows)
        total = tl.full([mode.narrow_rows, mode.value_width], 0.0, tl.float32)
        nothing = tl.full([mode.narrow_rows], 0.0, tl.float32)
        for head in range(mode.kv_heads):
            finish(
                total, nothing, nothing, v_scale, sinks, out, lse, batch, row, 1, head, index, mode
            )


@kernel
def combine(
    cut, parts, peaks, masses, info, v_scale, sinks, some_out, some_lse,
    out, lse,
    mode: tl.constexpr,
):  # fmt: skip
    """Some rows of an item that several programs had a part of; it began in `program`.

    And zeros for queries of no sequence, where those are not items of the list: by programs of
    their own, at the end.
    """
    number = tl.program_id(0)
    program = number // mode.combine_chunks
    if program < mode.programs:
        _put_together(
            cut, parts, peaks, masses, v_scale, sinks, out, lse, program,
            number - program * mode.combine_chunks, mode,
        )  # fmt: skip
    elif mode.wide_rows == 0:
        first = number - mode.programs * mode.combine_chunks
        for token in range(first, mode.batch * mode.tokens, mode.combine_clear):
            _clear(info, v_scale, sinks, out, lse, token, mode)


@kernel
def _put_together(
    cut, parts, peaks, masses, v_scale, sinks, out, lse, program, chunk, mode: tl.constexpr
):
    """The rows of a chunk, and every so many further ones if the item has more."""
    size: tl.constexpr = mode.combine_rows
    remaining = tl.load(cut + program * 8)
    batch = tl.load(cut + program * 8 + 1)
    row = tl.load(cut + program * 8 + 2)
    real = tl.load(cut + program * 8 + 3)
    head = tl.load(cut + program * 8 + 4)
    share = tl.load(cut + program * 8 + 5)
    end = tl.where(remaining > 0, real * mode.group, 0)
    count = 1 + (remaining + share - 1) // tl.maximum(share, 1)
    if mode.combine_chunks * size >= mode.rows:  # no loop for what happens once at most
        if chunk * size < end:
            _put_rows_together(
                parts, peaks, masses, v_scale, sinks, out, lse,
                program, count, batch, row, real, head, chunk * size, mode,
            )  # fmt: skip
    else:
        for first in range(chunk * size, end, mode.combine_chunks * size):
            _put_rows_together(
                parts, peaks, masses, v_scale, sinks, out, lse,
                program, count, batch, row, real, head, first, mode,
            )  # fmt: skip


@kernel
def _put_rows_together(
    parts, peaks, masses, v_scale, sinks, out, lse,
    program, count, batch, row, real, head, first,
    mode: tl.constexpr,
):  # fmt: skip
    """The rows from `first` on, from the `count` parts of their item."""
    size: tl.constexpr = mode.combine_rows
    index = first + tl.arange(0, size)
    total = tl.full([size, mode.value_width], 0.0, tl.float32)
    peak = tl.full([size], -3.4028234663852886e38, tl.float32)
    mass = tl.full([size], 0.0, tl.float32)
    for begin in range(0, count, mode.combine_parts):
        number = begin + tl.arange(0, mode.combine_parts)
        # What began in a program lies behind what it had of an earlier item.
        place = 2 * (program + number) + (number == 0).to(tl.int32)
        at = place[:, None] * mode.rows + index[None, :]
        there = (number < count)[:, None]
        column = tl.arange(0, mode.value_width)[None, None, :]
        x = tl.load(
            parts + at[:, :, None] * mode.value_width + column,
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
    finish(total, peak, mass, v_scale, sinks, out, lse, batch, row, real, head, index, mode)
