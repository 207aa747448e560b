"""The work lists of the Hopper kernels: tiles of each row block, balanced over thread blocks.

A row block is a block of queries (or of keys, in a dK/dV kernel), a column block one of the other
side. A work item is a row block of one batch row and head; the kernels are persistent, and each
thread block processes one work item in each wave. XLA computes the lists before the kernel starts;
those of a mask without arrays are computed when the call is traced.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.common.refs import Index
from ejkernel.kernels.flash_attention.pallas_sm90.mask_operands import padded_kernel_mask
from ejkernel.kernels.flash_attention.static_arrays import static_constants
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL, block_map
from ejkernel.types.kernel_mask import KernelMask, is_overlapping_interval
from ejkernel.types.rules import Rule

# Two counts of blocks are packed into one number.
_COUNT_BITS = 16
MOST_KEYS = 2 ** (_COUNT_BITS + 6) - 64
# What stays in the L2 cache of an H100 or H200 while other data is streamed through it.
_L2_BYTES = 16 * 2**20
# Up to so many comparisons, numbers are sorted by counting.
_COUNTING_SORT_LIMIT = 2**25


class WorkItems(NamedTuple):
    """The work items of a kernel: how many there are, and what they share.

    Attributes:
        batch: batch rows.
        heads: heads that have work items of their own.
        group: query heads of one work item.
        l2_groups: groups of work items that read the same arrays: batch rows times key heads.
        l2_group_bytes: size of these arrays.
        thread_blocks: thread blocks among which the items are divided.
    """

    batch: int
    heads: int
    group: int
    l2_groups: int
    l2_group_bytes: int
    thread_blocks: int


class TileListShape(NamedTuple):
    """Shape of the lists of tiles; `batch` and `heads` are 1 where all rows or heads agree."""

    batch: int
    heads: int
    row_blocks: int
    column_blocks: int

    def list_index(self, batch: Index, head: Index, row_block: Index) -> Index:
        """Which of the flattened lists a row block has."""
        batch = batch if self.batch > 1 else 0
        head = head if self.heads > 1 else 0
        return (batch * self.heads + head) * self.row_blocks + row_block

    def unpack(self, item: jax.Array, heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Batch row, head and row block of a work item."""
        row_block, pair = lax.rem(item, self.row_blocks), lax.div(item, self.row_blocks)
        return lax.div(pair, heads), lax.rem(pair, heads), row_block


class TileSchedule(NamedTuple):
    """Which thread block processes which work item, and the tiles of each.

    Attributes:
        work_list: the work item of each thread block in each wave, or -1;
            item = (batch * heads + head) * row_blocks + row_block.
        packed_counts: `count` and `partial` of that item as one number; where an item has several
            query heads, of the first.
        count: the number of tiles of each row block, at least one.
        partial: how many of them, the first ones, need the mask.
        index: the column blocks of each row block: partial, full, then empty ones.
    """

    work_list: jax.Array  # [waves, thread blocks]
    packed_counts: jax.Array  # [waves, thread blocks]
    count: jax.Array  # [#b, #n, row blocks]
    partial: jax.Array  # [#b, #n, row blocks]
    index: jax.Array  # [#b, #n, row blocks, column blocks]

    @property
    def list_shape(self) -> TileListShape:
        return TileListShape(*self.index.shape)


def unpack_counts(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many tiles a work item has, and how many of them are partial."""
    return packed & (2**_COUNT_BITS - 1), lax.shift_right_logical(packed, _COUNT_BITS)


def query_block_schedule(
    rule: Rule, items: WorkItems, q_len: int, kv_len: int, block_q: int, block_k: int
) -> TileSchedule:
    """The key blocks of every query block."""
    sizes = (items, q_len, kv_len, block_q, block_k)
    if not jax.tree.leaves(rule):  # known before anything runs
        return static_constants(_query_block_schedule, rule, *sizes)
    return _query_block_schedule(rule, *sizes)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _query_block_schedule(
    rule: Rule, items: WorkItems, q_len: int, kv_len: int, block_q: int, block_k: int
) -> TileSchedule:
    if all(map(is_overlapping_interval, rule.parts())):
        sizes = (-(-size // block) * block for size, block in ((q_len, block_q), (kv_len, block_k)))
        mask = padded_kernel_mask(rule, q_len, kv_len, *sizes)
        return _interval_schedule(mask, items, q_len, kv_len, block_q, block_k)
    state = block_map(rule, q_len, kv_len, block_q, block_k).state
    if kv_len % block_k:  # keys past the last one must be masked
        last = jnp.arange(state.shape[-1]) == state.shape[-1] - 1
        state = jnp.where(last & (state == FULL), jnp.int8(PARTIAL), state)
    return _block_map_schedule(state, items)


def key_block_schedule(
    rule: Rule, items: WorkItems, q_len: int, kv_len: int, block_q: int, block_k: int
) -> TileSchedule:
    """The query blocks of every key block; a work item has all query heads of its key head."""
    sizes = (items, q_len, kv_len, block_q, block_k)
    if not jax.tree.leaves(rule):
        return static_constants(_key_block_schedule, rule, *sizes)
    return _key_block_schedule(rule, *sizes)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _key_block_schedule(
    rule: Rule, items: WorkItems, q_len: int, kv_len: int, block_q: int, block_k: int
) -> TileSchedule:
    # Queries past the last one add nothing, and keys past the last one are not written.
    state = block_map(rule, q_len, kv_len, block_q, block_k).state
    return _block_map_schedule(jnp.swapaxes(state, 2, 3), items)


def _interval_schedule(
    mask: KernelMask, items: WorkItems, q_len: int, kv_len: int, block_q: int, block_k: int
) -> TileSchedule:
    """The schedule of `_block_map_schedule` where each row block has one range of column blocks.

    Nothing needs to be sorted.
    """
    blocks = -(-kv_len // block_k)
    lower, upper = np.int32(0), np.int32(kv_len - 1)
    lower = lower if mask.lower is None else jnp.maximum(mask.lower, lower)
    upper = upper if mask.upper is None else jnp.minimum(mask.upper, upper)
    lower, upper = jnp.broadcast_arrays(lower, upper)
    real = jnp.arange(lower.shape[1]) < q_len
    sees = real & (lower <= upper)
    rows = (
        jnp.where(sees, lower // block_k, blocks),
        jnp.where(sees, upper // block_k + 1, 0),
        jnp.where(real, -(-lower // block_k), 0),
        jnp.where(real, (upper + 1) // block_k, blocks),
    )
    # Of a row block: the first column block of which some query sees something, and the one after
    # the last; the first of which every query sees all, and the one after the last.
    first, after, full_first, full_after = lax.reduce(
        tuple(x.reshape(x.shape[0], 1, -1, block_q) for x in rows),
        (np.int32(blocks), np.int32(0), np.int32(0), np.int32(blocks)),
        lambda a, b: (
            jnp.minimum(a[0], b[0]),
            jnp.maximum(a[1], b[1]),
            jnp.maximum(a[2], b[2]),
            jnp.minimum(a[3], b[3]),
        ),
        (3,),
    )
    # A row block without tiles still writes its result: it has one tile, in which it sees nothing.
    count = jnp.maximum(after - first, 1)
    full = jnp.maximum(full_after - full_first, 0)
    partial = count - full
    early = jnp.where(full > 0, full_first - first, count)  # partial tiles before the full ones
    step = jnp.arange(blocks, dtype=jnp.int32)
    visited = count[..., None]
    first, full, early, all_partial = (x[..., None] for x in (first, full, early, partial))
    moved = jnp.where(step < all_partial, full, early - all_partial)
    first = jnp.minimum(first, blocks - 1)
    index = first + step + jnp.where(step < early, 0, moved)
    # After them the empty tiles, for which the gradient of a bias is written, too.
    empty = step - visited
    empty = jnp.where(empty < first, empty, empty + visited)
    index = jnp.where(step < visited, index, empty)
    return _balanced_schedule(count, partial, index, items)


def _block_map_schedule(state: jax.Array, items: WorkItems) -> TileSchedule:
    rank = jnp.where(state == PARTIAL, 0, jnp.where(state == FULL, 1, 2)).astype(jnp.int32)
    index = _stable_argsort(rank)
    partial = (state == PARTIAL).sum(-1, dtype=jnp.int32)
    count = (state != EMPTY).sum(-1, dtype=jnp.int32)
    # A row block without tiles still writes its result: it has one tile, in which it sees nothing.
    partial = jnp.where(count == 0, 1, partial)
    count = jnp.maximum(count, 1)
    return _balanced_schedule(count, partial, index, items)


def _balanced_schedule(
    count: jax.Array, partial: jax.Array, index: jax.Array, items: WorkItems
) -> TileSchedule:
    row_blocks = count.shape[2]
    packed = partial << _COUNT_BITS | count
    comparisons = items.batch * items.heads * row_blocks**2
    if count.shape[:2] == (1, 1) and items.group == 1 and comparisons <= _COUNTING_SORT_LIMIT:
        lists = _uniform_work_list(count[0, 0], packed[0, 0], items)
        return TileSchedule(*lists, count, partial, index)
    lengths = jnp.broadcast_to(count, (items.batch, items.heads * items.group, row_blocks))
    lengths = lengths.reshape(items.batch, items.heads, items.group, row_blocks).sum(2)
    work_list = balanced_work_list(lengths.reshape(-1), items)
    packed = jnp.broadcast_to(packed, (items.batch, items.heads * items.group, row_blocks))
    packed = packed[:, :: items.group].reshape(-1)[jnp.maximum(work_list, 0)]
    return TileSchedule(work_list, packed, count, partial, index)


def balanced_work_list(lengths: jax.Array, items: WorkItems) -> jax.Array:
    """The work item of each thread block in each wave, [waves, thread blocks]; -1 for none.

    Items are processed section by section, so that what the items of a section read stays in L2. In
    a section the longest come first, assigned in serpentine order: the thread block with the
    longest item of one wave gets the shortest of the next. Every two sections begin with another
    thread block, and the second of them runs in the opposite direction, so that the imbalance that
    is left, the same in all sections, is spread over all thread blocks.
    """
    sections = _l2_sections(lengths.size, items)
    size = lengths.size // sections
    order = _stable_argsort(-lengths.reshape(sections, size))
    order = order + size * jnp.arange(sections, dtype=jnp.int32)[:, None]
    rank = _serpentine_ranks(size, sections, items.thread_blocks)
    padding = ((0, 0), (0, rank.shape[1] * items.thread_blocks - size))
    padded = jnp.pad(order, padding, constant_values=-1).reshape(-1)
    section = np.arange(sections)[:, None, None]
    return padded[np.concatenate(section * rank[0].size + rank)]


def _serpentine_ranks(size: int, sections: int, thread_blocks: int) -> np.ndarray:
    """The rank, by descending length, of each thread block's items; [sections, waves, blocks]."""
    waves = -(-size // thread_blocks)
    rank = np.arange(waves * thread_blocks).reshape(waves, thread_blocks)
    rank[1::2] = rank[1::2, ::-1]
    rotated = lambda i: np.roll(rank, i // 2 * 2 * thread_blocks // sections, axis=1)
    return np.stack([rotated(i)[:, :: -1 if i % 2 else 1] for i in range(sections)])


def _uniform_work_list(
    lengths: jax.Array, info: jax.Array, items: WorkItems
) -> tuple[jax.Array, jax.Array]:
    """`balanced_work_list` where all batch rows and heads have the same lists, and `info` of each.

    From the length of each row block and a number about it, in two small kernels on a GPU: for each
    position in the work list, the row block of the wanted rank is found by comparison.
    """
    (row_blocks,) = lengths.shape
    heads = items.batch * items.heads
    sections = _l2_sections(heads * row_blocks, items)
    section_heads = heads // sections
    place = _serpentine_ranks(section_heads * row_blocks, sections, items.thread_blocks)
    # Positions past the last item have a rank that no row block has.
    rank = (place // section_heads).reshape(-1, items.thread_blocks, 1)
    head = np.arange(sections)[:, None, None] * section_heads + place % section_heads
    begin = head.astype(np.int32).reshape(rank.shape) * row_blocks
    row_block = jnp.arange(row_blocks, dtype=jnp.int32)
    mine, other = lengths[:, None], lengths
    before = (other > mine) | ((other == mine) & (row_block < row_block[:, None]))
    found = before.sum(-1, dtype=jnp.int32) == rank  # [waves, thread blocks, row blocks]
    work_list = jnp.where(found, begin + row_block, -1).max(-1)
    return work_list, jnp.where(found, info, 0).max(-1)


def _l2_sections(count: int, items: WorkItems) -> int:
    """How many sections to divide so many items into: few enough to keep all thread blocks busy."""
    fitting, best = max(1, _L2_BYTES // items.l2_group_bytes), 1
    for sections in range(1, items.l2_groups + 1):
        if 2 * count < 3 * items.thread_blocks * sections:
            break
        if items.l2_groups % sections == 0:
            best = sections
            if items.l2_groups // sections <= fitting:
                break
    return best


def _stable_argsort(numbers: jax.Array) -> jax.Array:
    """A stable argsort along the last axis.

    A few numbers are sorted by counting: two small kernels on a GPU, where a sort takes a dozen.
    The number of elements that come first is an element's position, and each position looks for its
    element.
    """
    size = numbers.shape[-1]
    if numbers.size * size > _COUNTING_SORT_LIMIT:
        return jnp.argsort(numbers, axis=-1, stable=True).astype(jnp.int32)
    index = jnp.arange(size, dtype=jnp.int32)
    other, one = numbers[..., None, :], numbers[..., :, None]
    first = (other < one) | ((other == one) & (index < index[:, None]))
    position = first.sum(-1, dtype=jnp.int32)
    here = position[..., None, :] == index[:, None]
    return jnp.where(here, index, 0).sum(-1, dtype=jnp.int32)
