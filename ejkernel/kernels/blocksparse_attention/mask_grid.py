"""The grid over the blocks of a mask: what each step prefetches, and grids without idle steps.

Arrays over the grid are kept as [head_shards, q_shards, heads, q_blocks, kv_blocks], the last
three within a shard, so that the entries of a shard do not depend on another one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ejkernel.kernels.blocksparse_attention.mask_base import Mask
from ejkernel.kernels.blocksparse_attention.mask_blocks import block_slices
from ejkernel.types.block_map import EMPTY, PARTIAL

_Q, _KV = 3, 4


class MaskGridLayout(NamedTuple):
    """How a mask is cut into blocks and shards, and which way the grid runs."""

    block_q: int
    block_kv: int
    head_shards: int
    q_shards: int
    is_dkv: bool

    @property
    def fetched_axis(self) -> int:
        """The axis along which blocks are fetched one after the other."""
        return _Q if self.is_dkv else _KV

    @property
    def grid_order(self) -> tuple[int, ...]:
        """The axes from the outermost loop of a shard to the innermost."""
        return (0, 1, 4, 2, 3) if self.is_dkv else (0, 1, 2, 3, 4)

    def spread(self, by_mask: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """The array over the grid from one [masks, q_blocks, kv_blocks] and the mask of each head.

        Where the heads of every shard share one mask, a shard has only one.
        """
        heads = heads.reshape(self.head_shards, -1)
        if np.all(heads == heads[:, :1]):
            heads = heads[:, :1]
        _, q_blocks, kv_blocks = by_mask.shape
        shape = (*heads.shape, self.q_shards, q_blocks // self.q_shards, kv_blocks)
        return by_mask[heads].reshape(shape).transpose(0, 2, 1, 3, 4)

    def merge_shards(self, array: np.ndarray) -> np.ndarray:
        """The shards of an array over the grid, combined: [heads, q_blocks, kv_blocks]."""
        head_shards, q_shards, heads, q_blocks, kv_blocks = array.shape
        shape = (head_shards * heads, q_shards * q_blocks, kv_blocks)
        return array.transpose(0, 2, 1, 3, 4).reshape(shape)


def partial_blocks(
    masks: Sequence[Mask], states: np.ndarray, layout: MaskGridLayout
) -> tuple[np.ndarray | None, np.ndarray]:
    """The distinct partial blocks, and for each block of each mask its index among them."""
    found: dict[bytes, int] = {}
    blocks = []
    indices = np.zeros(states.shape, np.int32)
    for number, i, j in np.argwhere(states == PARTIAL).tolist():
        block = masks[number][block_slices(i, j, layout.block_q, layout.block_kv)]
        index = found.setdefault(np.packbits(block).tobytes(), len(blocks))
        if index == len(blocks):
            blocks.append(block.T if layout.is_dkv else block)
        indices[number, i, j] = index
    return np.stack(blocks) if blocks else None, indices


def next_fetch(states: np.ndarray, layout: MaskGridLayout) -> np.ndarray:
    """The block, counted within its shard, that the next non-empty step of the grid fetches."""
    fetched = np.indices(states.shape, sparse=True)[layout.fetched_axis]
    return next_active(states != EMPTY, np.broadcast_to(fetched, states.shape), layout)


def next_active(active: np.ndarray, values: np.ndarray, layout: MaskGridLayout) -> np.ndarray:
    """At each step the value of the first active step from there on, cyclically.

    A shard without an active step has zeros.
    """
    ordered = active.transpose(layout.grid_order)
    steps = ordered.reshape(*ordered.shape[:2], -1)
    count = steps.shape[-1]
    # A running minimum from the end: the smallest active step so far is the next one.
    following = np.where(steps, np.arange(count), count)[..., ::-1]
    following = np.minimum.accumulate(following, axis=-1)[..., ::-1]
    following = np.where(following < count, following, following[..., :1]) % count
    found = np.take_along_axis(
        values.transpose(layout.grid_order).reshape(steps.shape), following, axis=-1
    )
    found = np.where(steps.any(axis=-1, keepdims=True), found, 0)
    return found.reshape(ordered.shape).transpose(np.argsort(layout.grid_order))


def without_idle_steps(
    grid: dict[str, np.ndarray], layout: MaskGridLayout
) -> dict[str, np.ndarray]:
    """The grid without the steps in which no row (for dkv: no column) of a shard has work.

    The active steps of a row come first, those of a column last; the others hold zeros. Shards with
    fewer steps are padded to the busiest one with empty blocks, which fetch what the last step
    fetched.
    """
    axis = layout.fetched_axis
    active = grid["block_mask"] != EMPTY
    count = active.sum(axis=axis, keepdims=True)
    # A grid has at least one step, even if there is nothing to do.
    steps_of_shard = np.maximum(count.max(axis=(0, 2, 3, 4), keepdims=True), 1)
    step = np.arange(steps_of_shard.max())
    step = step.reshape([-1 if dimension == axis else 1 for dimension in range(active.ndim)])
    last_or_step = np.minimum(step, steps_of_shard - 1)
    rank = last_or_step - (steps_of_shard - count if layout.is_dkv else 0)
    has_work = (rank >= 0) & (rank < count)
    active_first = np.argsort(~active, axis=axis, kind="stable")
    source = np.take_along_axis(active_first, np.where(has_work, rank, 0), axis=axis)
    packed = {
        name: np.where(has_work, np.take_along_axis(array, source, axis=axis), 0)
        for name, array in grid.items()
    }
    packed["block_mask"] = np.where(step < steps_of_shard, packed["block_mask"], EMPTY)
    return packed
