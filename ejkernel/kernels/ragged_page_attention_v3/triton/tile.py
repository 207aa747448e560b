"""Device functions for one tile of paged attention: loads, logits, online softmax, results."""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.common.triton.bridge import triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, Tensor, TensorOrPair
from ejkernel.kernels.ragged_page_attention_v3.triton.operands import PagedStaticArguments

tl: Any = None


@triton_jit
def tile_range(
    block: Scalar, tokens: Scalar, length: Scalar, kv_length: Scalar, static: PagedStaticArguments,
):  # fmt: skip
    """The first tile of keys that a block of queries may see, and the end of these tiles."""
    first = kv_length - length + block * tokens
    last = tl.minimum(first + tokens, kv_length) - 1
    stop = tl.maximum(last + static.block_k, 0) // static.block_k
    begin = 0
    if static.window > 0:
        begin = tl.maximum(first - static.window + 1, 0) // static.block_k
    return begin, stop


@triton_jit
def page_ids(pages: Pointer, j: Scalar, kv_length: Scalar, static: PagedStaticArguments):
    """The page of a tile, its two or four pages, or the page of each position; -1 past the length.

    Scalars where possible: a tensor that is carried to the next step would have to be exchanged
    between threads.
    """
    position = j * static.block_k
    if static.pages_per_tile == 0:
        position += tl.arange(0, static.block_k)
    a = tl.load(pages + position // static.page_size, mask=position < kv_length, other=-1)
    b, c, d = a, a, a
    if static.pages_per_tile > 1:
        at = pages + j * static.pages_per_tile
        b = tl.load(at + 1, mask=position + static.page_size < kv_length, other=-1)
    if static.pages_per_tile > 2:
        c = tl.load(at + 2, mask=position + 2 * static.page_size < kv_length, other=-1)
        d = tl.load(at + 3, mask=position + 3 * static.page_size < kv_length, other=-1)
    return a, b, c, d


@triton_jit
def _page_of_row(a: Tensor, b: Tensor, c: Tensor, d: Tensor, static: PagedStaticArguments):
    """The page of a tile, or of each of its positions."""
    row = tl.arange(0, static.block_k)
    if static.pages_per_tile == 2:
        a = tl.where(row < static.page_size, a, b)
    elif static.pages_per_tile == 4:
        a = tl.where(row < static.page_size, a, b)
        c = tl.where(row < 3 * static.page_size, c, d)
        a = tl.where(row < 2 * static.page_size, a, c)
    return a


@triton_jit
def load_queries(
    query: Pointer, k_scale: Pointer, batch: Scalar, row: Scalar, valid_tokens: Scalar,
    head: Scalar, row_index: Tensor, column_pairs: tl.constexpr, static: PagedStaticArguments,
):  # fmt: skip
    """Queries in the dtype of the matmul, a row for each token and each head of a group (GQA).

    Also returns the scale of the products of each row. With `column_pairs` the queries are two
    tiles: the even and the odd columns.
    """
    token = row_index // static.group
    at = (
        (batch * static.tokens + row + token) * static.heads
        + head * static.group
        + row_index % static.group
    )
    at = query + (tl.cast(at, tl.int64) * static.head_dim)[:, None]
    valid = (token < valid_tokens)[:, None]
    row_scale = tl.full(row_index.shape, static.scale, tl.float32)
    if static.k_scale:
        row_scale = row_scale * tl.load(k_scale + head)
    if column_pairs:
        column = 2 * tl.arange(0, static.head_width // 2)[None, :]
        mask = valid & (column < static.head_dim)
        even = tl.load(at + column, mask=mask, other=0.0)
        odd = tl.load(at + column + 1, mask=mask, other=0.0)
        if static.compute_dtype == "half":
            power = tl.maximum(_row_power(even), _row_power(odd))
            row_scale = row_scale * power
            even = _scaled(even, power)
            odd = _scaled(odd, power)
        q = (even, odd)
    else:
        column = tl.arange(0, static.head_width)[None, :]
        q = tl.load(at + column, mask=valid & (column < static.head_dim), other=0.0)
        if static.compute_dtype == "single":
            q = q.to(tl.float32)
        elif static.compute_dtype == "half":
            power = _row_power(q)
            row_scale = row_scale * power
            q = _scaled(q, power)
    return q, row_scale


@triton_jit
def _row_power(q: Tensor):
    """A power of two for each row that scales it into the range of float16.

    The largest element of a row becomes a number between 1 and 2. Elements that then underflow in
    float16 are below 2**-24 of it, far less than the rounding error of a bfloat16 query.
    """
    largest = tl.max(tl.abs(q.to(tl.float32)), 1)
    return tl.exp2(tl.floor(tl.log2(tl.maximum(largest, 1e-37))))


@triton_jit
def _scaled(q: Tensor, power: Tensor):
    return (q.to(tl.float32) / power[:, None]).to(tl.float16)


@triton_jit
def attention_step(
    acc: TensorOrPair, row_max: Tensor, row_sum: Tensor, q: TensorOrPair, row_scale: Tensor,
    keys: Pointer, values: Pointer, a: Tensor, b: Tensor, c: Tensor, d: Tensor, j: Scalar,
    valid_tokens: Scalar, position: Scalar, head: Scalar, row_index: Tensor, masked: tl.constexpr,
    column_pairs: tl.constexpr, static: PagedStaticArguments,
):  # fmt: skip
    """The running softmax after one more tile of keys; with `column_pairs` acc and q are pairs."""
    key_position = j * static.block_k + tl.arange(0, static.block_k)
    ids = _page_of_row(a, b, c, d, static)
    valid = (ids >= 0) & (ids < static.pages) & (key_position < position + valid_tokens)
    if static.window > 0:
        valid = valid & (key_position > position - static.window)
    slot = key_position % static.page_size
    if static.int64_offsets:
        ids = tl.cast(ids, tl.int64)
        head = tl.cast(head, tl.int64)  # its stride is that of all pages where heads come first
    if column_pairs:
        even, odd = _load_column_pairs(
            keys, head * static.k_head_stride,
            ids * (static.k_page_stride // 2) + slot * (static.k_token_stride // 2), valid,
            static.head_dim, static.head_width, static,
        )  # fmt: skip
        x = tl.dot(q[0], tl.trans(even))
        x = tl.dot(q[1], tl.trans(odd), x)
    else:
        k = _load_tile(
            keys + head * static.k_head_stride,
            ids * static.k_page_stride + slot * static.k_token_stride, valid, masked,
            static.head_dim, static.head_width, static,
        ).to(q.dtype)  # fmt: skip
        x = tl.dot(q, tl.trans(k), input_precision=static.precision)
    if not static.plain:
        x = x * row_scale[:, None]
    if static.soft_cap > 0.0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right for infinite exp(2x).
        x = 1.0 - 2.0 / (tl.exp2(x * (2.0 * static.log2_e / static.soft_cap)) + 1.0)
    if masked:
        token = row_index // static.group
        query_position = tl.where(token < valid_tokens, position + token, -1)[:, None]
        visible = (key_position[None, :] <= query_position) & valid[None, :]
        if static.window > 0:
            visible = visible & (key_position[None, :] > query_position - static.window)
        x = tl.where(visible, x, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(x, 1) * static.exp2_scale)
    weights = tl.exp2(x * static.exp2_scale - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    row_sum = row_sum * alpha + tl.sum(weights, 1)
    if column_pairs:
        even, odd = _load_column_pairs(
            values, static.v_offset + head * static.v_head_stride,
            ids * (static.v_page_stride // 2) + slot * (static.v_token_stride // 2), valid,
            static.value_dim, static.value_width, static,
        )  # fmt: skip
        weights = weights.to(even.dtype)
        new_acc = (
            tl.dot(weights, even, acc[0] * alpha[:, None]),
            tl.dot(weights, odd, acc[1] * alpha[:, None]),
        )
    else:
        v = _load_tile(
            values + static.v_offset + head * static.v_head_stride,
            ids * static.v_page_stride + slot * static.v_token_stride, valid, masked,
            static.value_dim, static.value_width, static,
        ).to(q.dtype)  # fmt: skip
        new_acc = acc * alpha[:, None]
        new_acc = tl.dot(weights.to(v.dtype), v, new_acc, input_precision=static.precision)
    return new_acc, new_max, row_sum


@triton_jit
def _load_tile(
    base: Pointer, at: Tensor, valid: Tensor, masked: tl.constexpr, dim: tl.constexpr,
    width: tl.constexpr, static: PagedStaticArguments,
):  # fmt: skip
    """[block_k, width] of keys or values at these offsets, 0 where they are not `valid`."""
    column = tl.arange(0, width)[None, :]
    at = base + at[:, None] + column
    if masked and dim != width:
        x = tl.load(at, mask=valid[:, None] & (column < dim), other=0.0)
    elif masked:
        x = tl.load(at, mask=valid[:, None], other=0.0)
    elif dim != width:
        x = tl.load(at, mask=column < dim, other=0.0)
    else:
        x = tl.load(at)
    if static.cache_as_bits:
        x = x.to(tl.int16)
        x = _from_e5m2(x << 8) if static.cache_format == "e5m2" else _from_e4m3(x)
    return x


@triton_jit
def _load_column_pairs(
    base: Pointer, first: Scalar, at: Tensor, valid: Tensor, dim: tl.constexpr, width: tl.constexpr,
    static: PagedStaticArguments,
):  # fmt: skip
    """The even and the odd columns of an 8-bit cache as float16, each [block_k, width / 2].

    Two neighbours are loaded as one 16-bit number, which `ldmatrix` can transpose; bytes would be
    loaded one by one.
    """
    column = tl.arange(0, width // 2)[None, :]
    at = (base + first).to(tl.pointer_type(tl.int16), bitcast=True) + at[:, None] + column
    if dim != width:
        x = tl.load(at, mask=valid[:, None] & (column < dim // 2), other=0)
    else:
        x = tl.load(at, mask=valid[:, None], other=0)
    if static.convert_asm != "":
        # Two 16-bit numbers at a time: four bytes in, even bytes and odd bytes out.
        even, odd = tl.inline_asm_elementwise(
            static.convert_asm, "=r,=r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif static.cache_format == "e5m2":
        even = _from_e5m2(x << 8)
        odd = _from_e5m2(x & -256)
    elif static.cache_format == "e4m3":
        even = _from_e4m3(x)
        odd = _from_e4m3(x >> 8)
    else:
        even = ((x << 8) >> 8).to(tl.float16)
        odd = (x >> 8).to(tl.float16)
    return even, odd


@triton_jit
def _from_e5m2(x: Tensor):
    """The upper byte of a float16."""
    return x.to(tl.int16).to(tl.float16, bitcast=True)


@triton_jit
def _from_e4m3(x: Tensor):
    """The lower byte: a float16 with another exponent bias, whose largest code is NaN."""
    value = ((x & 0x7F) << 7) | ((x & 0x80) << 8)
    value = value.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return tl.where((x & 0x7F) == 0x7F, float("nan"), value)


@triton_jit
def store_results(
    acc: Tensor, row_max: Tensor, row_sum: Tensor, v_scale: Pointer, sinks: Pointer, out: Pointer,
    lse: Pointer, batch: Scalar, row: Scalar, valid_tokens: Scalar, head: Scalar, row_index: Tensor,
    static: PagedStaticArguments,
):  # fmt: skip
    """Write output and log-sum-exp of the rows `row_index` of an item."""
    token = row_index // static.group
    query_head = head * static.group + row_index % static.group
    visible = row_sum > 0.0
    denominator = row_sum
    if static.sinks:
        denominator += tl.exp2(tl.load(sinks + query_head) * static.log2_e - row_max)
    acc = acc / tl.where(visible, denominator, 1.0)[:, None]
    if static.v_scale:
        acc = acc * tl.load(v_scale + head)
    at = tl.cast((batch * static.tokens + row + token) * static.heads + query_head, tl.int64)
    column = tl.arange(0, static.value_width)[None, :]
    mask = (token < valid_tokens)[:, None] & (column < static.value_dim)
    at = out + at[:, None] * static.value_dim + column
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)
    natural = (row_max + tl.log2(tl.where(visible, row_sum, 1.0))) * static.ln_2
    at = lse + (batch * static.heads + query_head) * static.tokens + row + token
    tl.store(at, tl.where(visible, natural, float("-inf")), mask=token < valid_tokens)
