"""Which blocks the tokens of a tile have chosen, and which tokens have chosen a block.

A tile of neighbouring tokens visits the union of their lists, so that what several of them have
chosen is loaded once. The gradients of keys and values visit the inverse lists, which a stable sort
gives: their order, and with it every sum, is the same in every run.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, Tensor
from ejkernel.kernels.native_sparse_attention.inputs import Inputs
from ejkernel.kernels.native_sparse_attention.triton.operands import (
    KeyBlocks,
    SelectedStaticArguments,
    query_tiles,
)
from ejkernel.ops.platform import Device

tl: Any = None

_NUM_WARPS = 4
_ROWS_OF_AN_ITEM = 4096  # queries of one program for the gradients of a block


class TileLists(NamedTuple):
    """The blocks of every tile of queries, in the order of their keys."""

    tokens: Int[Array, "2 tiles"]  # the first token of a tile, and the end of its tokens
    counts: Int[Array, "b k tiles"]
    spans: Int[Array, "b k tiles 2 slots"]  # the first key of a block, and the end of its keys
    members: Int[Array, "b k tiles slots words"]  # a bit for each token of the tile


def tile_lists(
    inputs: Inputs, blocks: KeyBlocks, static: SelectedStaticArguments, device: Device
) -> TileLists:
    """The lists of all tiles of queries."""
    tiles = (static.batch, static.kv_heads, static.tiles)
    shape = lambda *sizes: jax.ShapeDtypeStruct((*tiles, *sizes), jnp.int32)
    tokens = query_tiles(inputs, static)
    found = launch(
        tile_list_kernel,
        [inputs.block_indices, *blocks, tokens],
        [shape(), shape(2, static.slots), shape(static.slots, static.words)],
        static,
        LaunchConfig(math.prod(tiles), _NUM_WARPS, 1),
        device,
    )
    return TileLists(tokens, *found)


@triton_jit
def tile_list_kernel(
    index: Pointer, key_spans: Pointer, of_tokens: Pointer, tiles: Pointer,
    counts: Pointer, spans: Pointer, members: Pointer, static: SelectedStaticArguments,
):  # fmt: skip
    """The blocks that some token of a tile has chosen, in ascending order."""
    program = tl.program_id(0)
    tile = program % static.tiles
    kv_head = program // static.tiles % static.kv_heads
    batch = program // (static.tiles * static.kv_heads)
    start = tl.load(tiles + tile)
    end = tl.load(tiles + static.tiles + tile)
    row = tl.cast(batch, tl.int64) * static.length + start
    index += (row * static.kv_heads + kv_head) * static.choices
    spans += tl.cast(program, tl.int64) * (2 * static.slots)
    members += tl.cast(program, tl.int64) * (static.slots * static.words)

    token = start + tl.arange(0, static.tokens)
    own = tl.load(of_tokens + static.length + token, mask=token < end, other=-1)
    first = tl.load(of_tokens + token, mask=own >= 0, other=static.numbers)
    last = tl.max(own, 0)
    count = last * 0
    # Sizes that keep the comparisons of a step, tokens x choices x numbers, in registers.
    part: tl.constexpr = min(static.tokens, 32)
    choice_block: tl.constexpr = 16 if part <= 16 else 4
    chunk: tl.constexpr = 64 if part * choice_block <= 128 else 32
    for chunk_start in range(tl.min(first, 0), last + 1, chunk):
        number = chunk_start + tl.arange(0, chunk)
        bits = _member_bits(index, of_tokens, start, end, number, 0, part, choice_block, static)
        some = bits != 0
        if static.words == 2:
            more = _member_bits(index, of_tokens, start, end, number, 1, part, choice_block, static)
            some = some | (more != 0)
        chosen = some.to(tl.int32)
        slot = count + tl.cumsum(chosen, 0) - chosen
        first_key = tl.load(key_spans + number, mask=some, other=0)
        keys_end = tl.load(key_spans + static.numbers + number, mask=some, other=0)
        tl.store(spans + slot, first_key, mask=some)
        tl.store(spans + static.slots + slot, keys_end, mask=some)
        tl.store(members + slot * static.words, bits, mask=some)
        if static.words == 2:
            tl.store(members + slot * static.words + 1, more, mask=some)
        count += tl.sum(chosen, 0)
    tl.store(counts + program, count)


@triton_jit
def _member_bits(
    index: Pointer, of_tokens: Pointer, start: Scalar, end: Scalar, number: Tensor,
    word: tl.constexpr, part: tl.constexpr, choice_block: tl.constexpr,
    static: SelectedStaticArguments,
):  # fmt: skip
    """For each number a bit for every token of one word of the tile that has chosen the block."""
    member = word * 32 + tl.arange(0, part)
    token = start + member
    own = tl.load(of_tokens + static.length + token, mask=token < end, other=-1)
    first = tl.load(of_tokens + token, mask=own >= 0, other=0)
    stride: tl.constexpr = static.kv_heads * static.choices
    found = tl.full([part, number.shape[0]], 0, tl.int32)
    for choice_start in range(0, static.choices, choice_block):
        choice = choice_start + tl.arange(0, choice_block)
        inside = (own >= 0)[:, None] & (choice < static.choices)[None, :]
        at = index + member[:, None] * stride + choice[None, :]
        chosen = tl.load(at, mask=inside, other=-1)
        # Blocks that lie ahead of the token, or are none of its sequence, count for nothing.
        chosen = tl.where((chosen >= 0) & (chosen <= (own - first)[:, None]), chosen, -1)
        chosen = tl.where(chosen >= 0, chosen + first[:, None], -1)
        same = (chosen[:, :, None] == number[None, None, :]).to(tl.int32)
        found = found | tl.max(same, 1)
    return tl.sum(found << tl.arange(0, part)[:, None], 0)


class KeyLists(NamedTuple):
    """The tokens that have chosen each block, cut into work items of bounded length.

    Attributes:
        tokens: the tokens of all blocks, block after block; -1 where a token names a block again.
        items: for each item its block, over all rows and key heads, and its range of `tokens`.
        items_of_keys: for every key the range of the items of its block.
    """

    tokens: Int[Array, "pairs"]
    items: Int[Array, "3 items"]
    items_of_keys: Int[Array, "2 b k t"]


def key_lists(inputs: Inputs, blocks: KeyBlocks, static: SelectedStaticArguments) -> KeyLists:
    """The inverse of the tokens' lists."""
    batch, kv_heads, numbers = static.batch, static.kv_heads, static.numbers
    first, own = (x[None, :, None, None] for x in blocks.of_tokens)
    index = inputs.block_indices
    useful = (index >= 0) & (index <= own - first)
    # Rows and key heads one after the other: a single sort of one axis is the fastest.
    head = jnp.arange(batch * kv_heads, dtype=jnp.int32).reshape(batch, 1, kv_heads, 1)
    block = jnp.where(useful, head * numbers + first + index, batch * kv_heads * numbers)
    token = jnp.broadcast_to(
        jnp.arange(static.length, dtype=jnp.int32)[None, :, None, None], block.shape
    )
    flat = lambda x: jnp.swapaxes(x, 1, 2).reshape(-1)
    block, token = lax.sort((flat(block), flat(token)), num_keys=1)
    again = (block[1:] == block[:-1]) & (token[1:] == token[:-1])
    token = jnp.where(jnp.pad(again, (1, 0)), -1, token)

    counts = jnp.zeros(batch * kv_heads * numbers + 1, jnp.int32).at[block].add(1)[:-1]
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    length = item_length(static)
    item_counts = (counts + length - 1) // length
    item_ends = jnp.cumsum(item_counts, dtype=jnp.int32)
    item = jnp.arange(max_items(static), dtype=jnp.int32)
    owner = jnp.searchsorted(item_ends, item, side="right", method="sort").astype(jnp.int32)
    exists = owner < counts.shape[0]
    owner = jnp.minimum(owner, counts.shape[0] - 1)
    start = (ends - counts)[owner] + (item - (item_ends - item_counts)[owner]) * length
    start, end = (
        jnp.where(exists, x, 0) for x in (start, jnp.minimum(start + length, ends[owner]))
    )
    by_block = jnp.stack([item_ends - item_counts, item_ends]).reshape(2, -1, numbers)
    number = blocks.of_tokens[1]
    of_keys = jnp.where(number >= 0, by_block[:, :, jnp.maximum(number, 0)], 0)
    return KeyLists(
        token,
        jnp.stack([owner, start, end]),
        of_keys.reshape(2, batch, kv_heads, static.length),
    )


def item_length(static: SelectedStaticArguments) -> int:
    """The most tokens of an item."""
    return max(1, _ROWS_OF_AN_ITEM // static.group)


def max_items(static: SelectedStaticArguments) -> int:
    """A bound on the items: each block may have one that is not full."""
    heads = static.batch * static.kv_heads
    pairs = heads * static.length * static.choices
    return pairs // item_length(static) + min(pairs, heads * static.numbers)
