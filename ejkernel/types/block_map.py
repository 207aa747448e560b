"""Which blocks of a mask are empty, partial or full, and the lists of blocks that kernels visit."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int8

from ejkernel.types.rule import Rule
from ejkernel.types.rule_arrays import Index

EMPTY, PARTIAL, FULL = 0, 1, 2


class BlockList(NamedTuple):
    """For each row of blocks, the blocks to visit, in ascending order.

    Attributes:
        first: the first active block, 0 if there is none.
        count: the number of active blocks.
        index: step -> block; past `count` the last active block again (0 if there is none). None
            when every row is a range: then the block of a step is `first + step`.
    """

    first: Int[Array, "b n i"]
    count: Int[Array, "b n i"]
    index: Int[Array, "b n i j"] | None

    def at(self, batch: Index, head: Index, row: Index, step: Index) -> Index:
        """The block that `row` visits at `step`; batch or head axes of size 1 are shared."""
        batch = batch if self.first.shape[0] > 1 else 0
        head = head if self.first.shape[1] > 1 else 0
        if self.index is None:
            return self.first[batch, head, row] + step
        return self.index[batch, head, row, step]


class BlockMap(NamedTuple):
    """The blocks of a mask.

    Attributes:
        state: `EMPTY`, `PARTIAL` or `FULL` for each block. A block reported as partial may still be
            empty or full; the other two are certain.
        rows: for each query block, the key blocks that are not empty.
        columns: for each key block, the query blocks that are not empty.
    """

    state: Int8[Array, "b n i j"]
    rows: BlockList
    columns: BlockList


def block_map(rule: Rule, q_len: int, kv_len: int, block_q: int, block_k: int) -> BlockMap:
    """The block map of a mask, in O(blocks) work: nothing of size Q x K is made.

    Args:
        rule: the mask.
        q_len: number of queries.
        kv_len: number of keys.
        block_q: queries in a block; the last block may be shorter.
        block_k: keys in a block; the last block may be shorter.

    Returns:
        The map, with a batch axis of 1 where all batch rows agree, and a head axis of 1 unless the
        mask differs between heads.

    Raises:
        ValueError: if a block size is not positive.

    >>> from ejkernel.types.rules import Band
    >>> causal = block_map(Band(None, 0), 4, 4, 2, 2)
    >>> causal.state[0, 0].tolist()
    [[1, 0], [2, 1]]
    >>> causal.rows.count[0, 0].tolist(), causal.columns.first[0, 0].tolist()
    ([1, 2], [0, 1])
    """
    if block_q < 1 or block_k < 1:
        raise ValueError(f"block_map: block sizes must be positive, got {block_q} and {block_k}.")
    some, every = rule.blocks(q_len, kv_len, block_q, block_k)
    if some.ndim == 3:
        some, every = some[None], every[None]
    state = some.astype(jnp.int8) + (some & every).astype(jnp.int8)
    return BlockMap(
        state=state,
        rows=_block_list(some, rule.contiguous),
        columns=_block_list(jnp.swapaxes(some, -1, -2), rule.contiguous_columns),
    )


def _block_list(active: jax.Array, contiguous: bool) -> BlockList:
    size = active.shape[-1]
    position = jnp.arange(size, dtype=jnp.int32)
    # Inactive blocks are sorted after the active ones.
    ascending = jnp.where(active, position, size)
    first, last, count = lax.reduce(
        (ascending, jnp.where(active, position, 0), active.astype(jnp.int32)),
        (np.int32(size), np.int32(0), np.int32(0)),
        lambda a, b: (jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]), a[2] + b[2]),
        (active.ndim - 1,),
    )
    index = None
    if not contiguous:
        ordered = lax.sort(ascending, dimension=active.ndim - 1, is_stable=False)
        index = jnp.minimum(ordered, last[..., None])
    return BlockList(jnp.where(count > 0, first, 0), count, index)
