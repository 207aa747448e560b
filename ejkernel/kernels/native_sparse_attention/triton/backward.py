"""The selected branch, backward: dQ like the forward pass, dK and dV by the inverse lists.

No sum depends on the order in which programs run: the gradients of a block are computed by one
program for each part of its list, and the parts are then summed in the order of the list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, Tensor
from ejkernel.kernels.native_sparse_attention.inputs import Branch, Inputs
from ejkernel.kernels.native_sparse_attention.triton.configs import SelectedTileConfig
from ejkernel.kernels.native_sparse_attention.triton.lists import KeyLists, TileLists
from ejkernel.kernels.native_sparse_attention.triton.operands import (
    KeyBlocks,
    SelectedStaticArguments,
)
from ejkernel.kernels.native_sparse_attention.triton.tile import (
    first_query,
    head_pointers,
    load_key_tile,
    load_rows,
    load_span,
    load_value_tile,
    store_rows,
    tile_list,
    tile_position,
    tile_rows,
    tile_tokens,
    visible_keys,
)
from ejkernel.ops.platform import Device

tl: Any = None

_SUM_ROWS, _SUM_WARPS = 16, 4


class RowTerms(NamedTuple):
    """Terms of the gradient for each row: d_logits = exp(logits - lse) * (d_weights - delta)."""

    lse: Float[Array, "b t n"]  # base 2; inf where a row sees no key
    delta: Float[Array, "b t n"]


def row_terms(branch: Branch, d_out: jax.Array) -> RowTerms:
    """The terms of a call, computed by XLA."""
    lse = jnp.swapaxes(branch.lse, 1, 2)
    # For a row that sees no key exp2(logits - inf) is 0, whatever the logits.
    lse = jnp.where(lse > -jnp.inf, lse * LOG2_E, jnp.inf)
    delta = (branch.out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)
    return RowTerms(lse, delta)


def queries_backward(
    inputs: Inputs,
    d_out: jax.Array,
    terms: RowTerms,
    lists: TileLists,
    static: SelectedStaticArguments,
    config: SelectedTileConfig,
    dtype: DTypeLike,
    device: Device,
) -> jax.Array:
    """The gradient of the queries."""
    (d_query,) = launch(
        dq_kernel,
        [*inputs[:3], d_out, *terms, *lists],
        [jax.ShapeDtypeStruct(inputs.query.shape, dtype)],
        static,
        LaunchConfig(static.programs, config.warps, config.stages),
        device,
    )
    return d_query


def keys_and_values_backward(
    inputs: Inputs,
    d_out: jax.Array,
    terms: RowTerms,
    lists: KeyLists,
    blocks: KeyBlocks,
    static: SelectedStaticArguments,
    config: SelectedTileConfig,
    dtype: DTypeLike,
    device: Device,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of keys and values."""
    items = lists.items.shape[1]
    dims = (static.head_dim, static.value_dim)
    parts = launch(
        dkdv_kernel,
        [*inputs[:3], d_out, *terms, blocks.spans, lists.tokens, lists.items],
        [jax.ShapeDtypeStruct((items, static.block_size, dim), jnp.float32) for dim in dims],
        static,
        LaunchConfig(items * static.steps, config.warps, config.stages),
        device,
    )
    tiles = -(-static.length // _SUM_ROWS)
    d_key, d_value = launch(
        sum_kernel,
        [*parts, blocks.spans, blocks.of_tokens, lists.items_of_keys],
        [jax.ShapeDtypeStruct(x.shape, dtype) for x in (inputs.key, inputs.value)],
        static,
        LaunchConfig(static.batch * static.kv_heads * tiles, _SUM_WARPS, 1),
        device,
    )
    return d_key, d_value


@triton_jit
def dq_kernel(
    query: Pointer, key: Pointer, value: Pointer, d_out: Pointer,
    lse: Pointer, delta: Pointer,
    tiles: Pointer, counts: Pointer, spans: Pointer, members: Pointer,
    d_query: Pointer, static: SelectedStaticArguments,
):  # fmt: skip
    """Gradient of a tile of queries."""
    tile, head_block, kv_head, batch = tile_position(tl.program_id(0), static)
    count, spans, members = tile_list(tile, kv_head, batch, counts, spans, members, static)
    tile_start, tile_end = tile_tokens(tile, tiles, static)
    q_start = first_query(batch, tile_start, kv_head, static)
    query += q_start * static.head_dim
    d_query += q_start * static.head_dim
    d_out += q_start * static.value_dim
    key, value = head_pointers(key, value, batch, kv_head, static)

    member, row, inside = tile_rows(tile_start, tile_end, head_block, static)
    token = tile_start + member
    q = load_rows(query, row, inside, static.head_dim, static.head_width)
    d_o = load_rows(d_out, row, inside, static.value_dim, static.value_width)
    row_lse = tl.load(lse + q_start + row, mask=inside, other=float("inf"))
    row_delta = tl.load(delta + q_start + row, mask=inside, other=0.0)
    d_q = tl.full([static.rows, static.head_width], 0.0, tl.float32)
    next_start, next_end = load_span(0, count, spans, tile_end, static)
    for step in range(count * static.steps):
        start, end = next_start, next_end
        # Prefetched a step ahead, so that no load waits for its own address.
        next_start, next_end = load_span(step + 1, count, spans, tile_end, static)
        k = load_key_tile(key, start, end, static)
        v = load_value_tile(value, start, end, static)
        x = tl.dot(q, tl.trans(k), input_precision=static.precision) * static.exp2_scale
        d_weights = tl.dot(d_o, tl.trans(v), input_precision=static.precision)
        visible = visible_keys(step, start, end, token, member, members, static)
        d_logits = tl.exp2(x - row_lse[:, None]) * (d_weights - row_delta[:, None])
        d_logits = tl.where(visible, d_logits, 0.0)
        d_q = tl.dot(d_logits.to(k.dtype), k, d_q, input_precision=static.precision)

    store_rows(d_query, d_q * static.scale, row, inside, static.head_dim, static.head_width)


@triton_jit
def dkdv_kernel(
    query: Pointer, key: Pointer, value: Pointer, d_out: Pointer,
    lse: Pointer, delta: Pointer,
    key_spans: Pointer, tokens: Pointer, items: Pointer,
    d_key: Pointer, d_value: Pointer, static: SelectedStaticArguments,
):  # fmt: skip
    """Gradients of a tile of keys and values from one part of the list of their block."""
    count = tl.num_programs(0) // static.steps
    item = tl.program_id(0) // static.steps
    block = tl.load(items + item)
    first = tl.load(items + count + item)
    last = tl.load(items + 2 * count + item)
    if first < last:
        offset = tl.program_id(0) % static.steps * static.block_k
        number = block % static.numbers
        kv_head = block // static.numbers % static.kv_heads
        batch = block // (static.numbers * static.kv_heads)
        start = tl.load(key_spans + number) + offset
        end = tl.load(key_spans + static.numbers + number)
        key, value = head_pointers(key, value, batch, kv_head, static)
        k = load_key_tile(key, start, end, static)
        v = load_value_tile(value, start, end, static)
        q_start = first_query(batch, 0, kv_head, static)
        d_k, d_v = _accumulate_list(
            k, v, start, end, query + q_start * static.head_dim, d_out + q_start * static.value_dim,
            lse + q_start, delta + q_start, tokens + first, last - first, static,
        )  # fmt: skip

        key_offset = offset + tl.arange(0, static.block_k)
        inside = key_offset < static.block_size
        part = tl.cast(item, tl.int64) * static.block_size
        store_rows(
            d_key + part * static.head_dim, d_k * static.scale, key_offset, inside,
            static.head_dim, static.head_width,
        )  # fmt: skip
        store_rows(
            d_value + part * static.value_dim, d_v, key_offset, inside,
            static.value_dim, static.value_width,
        )  # fmt: skip


@triton_jit
def _accumulate_list(
    k: Tensor, v: Tensor, start: Scalar, end: Scalar, query: Pointer, d_out: Pointer,
    lse: Pointer, delta: Pointer, tokens: Pointer, count: Scalar,
    static: SelectedStaticArguments,
):  # fmt: skip
    """The gradients of a tile of keys and values from the tokens of a list; tiles are transposed.

    The pointers are those of the first token of the row, and of the first head of the group.
    """
    # Rows of the list: the heads of its first token, then those of the next one.
    listed = tl.arange(0, static.rows)
    head = listed % static.group
    entry = listed // static.group
    key = start + tl.arange(0, static.block_k)
    d_k = tl.full([static.block_k, static.head_width], 0.0, tl.float32)
    d_v = tl.full([static.block_k, static.value_width], 0.0, tl.float32)
    token = tl.load(tokens + entry, mask=entry < count, other=-1)
    for _ in range(0, count * static.group, static.rows):
        inside = token >= 0
        row = tl.maximum(token, 0)
        if static.int64_offsets:
            row = row.to(tl.int64)
        row = row * static.heads + head
        newest = token
        # Prefetched a step ahead, so that no load waits for its own address.
        if static.rows % static.group == 0:
            entry += static.rows // static.group
        else:
            listed += static.rows
            entry = listed // static.group
            head = listed % static.group
        token = tl.load(tokens + entry, mask=entry < count, other=-1)
        q = load_rows(query, row, inside, static.head_dim, static.head_width)
        d_o = load_rows(d_out, row, inside, static.value_dim, static.value_width)
        # Of a row that is not inside lse is inf: exp2(logits - inf) is 0, whatever the logits.
        row_lse = tl.load(lse + row, mask=inside, other=float("inf"))
        row_delta = tl.load(delta + row, mask=inside, other=0.0)
        x = tl.dot(k, tl.trans(q), input_precision=static.precision) * static.exp2_scale
        weights = tl.exp2(x - row_lse[None, :])
        visible = key[:, None] <= newest[None, :]
        if static.uneven:
            visible = visible & (key < end)[:, None]
        weights = tl.where(visible, weights, 0.0)
        d_v = tl.dot(weights.to(d_o.dtype), d_o, d_v, input_precision=static.precision)
        # The accumulator starts at -delta, which then needs no registers of its own.
        minus_delta = tl.broadcast_to(-row_delta[None, :], [static.block_k, static.rows])
        d_weights = tl.dot(v, tl.trans(d_o), minus_delta, input_precision=static.precision)
        d_logits = weights * d_weights
        d_k = tl.dot(d_logits.to(q.dtype), q, d_k, input_precision=static.precision)
    return d_k, d_v


@triton_jit
def sum_kernel(
    key_parts: Pointer, value_parts: Pointer, key_spans: Pointer, of_tokens: Pointer,
    items_of_keys: Pointer, d_key: Pointer, d_value: Pointer, static: SelectedStaticArguments,
):  # fmt: skip
    """Gradients of some keys and values, summed over the parts of the lists of their blocks."""
    rows: tl.constexpr = 16
    tiles: tl.constexpr = (static.length + rows - 1) // rows
    program = tl.program_id(0)
    token = program % tiles * rows + tl.arange(0, rows)
    head = program // tiles
    inside = token < static.length
    number = tl.load(of_tokens + static.length + token, mask=inside, other=-1)
    start = tl.load(key_spans + number, mask=number >= 0, other=0)
    at = tl.cast(head, tl.int64) * static.length
    keys: tl.constexpr = static.batch * static.kv_heads * static.length
    first = tl.load(items_of_keys + at + token, mask=inside, other=0)
    last = tl.load(items_of_keys + keys + at + token, mask=inside, other=0)
    d_k = tl.full([rows, static.head_width], 0.0, tl.float32)
    d_v = tl.full([rows, static.value_width], 0.0, tl.float32)
    for i in range(tl.max(last - first, 0)):
        listed = first + i < last
        part = (first + i).to(tl.int64) * static.block_size + (token - start)
        d_k += load_rows(key_parts, part, listed, static.head_dim, static.head_width)
        d_v += load_rows(value_parts, part, listed, static.value_dim, static.value_width)
    batch = tl.cast(head // static.kv_heads, tl.int64)
    row = (batch * static.length + token) * static.kv_heads + head % static.kv_heads
    store_rows(d_key, d_k, row, inside, static.head_dim, static.head_width)
    store_rows(d_value, d_v, row, inside, static.value_dim, static.value_width)
