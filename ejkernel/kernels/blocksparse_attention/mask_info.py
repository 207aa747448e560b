"""The blocks of a mask as a kernel reads them: which blocks to visit, in which order.

The grid of a forward pass runs over (head, query block, key block), that of the key and value
gradients (`dkv`) over (key block, head, query block). Empty blocks are skipped, full blocks need no
mask, and for partial blocks the mask comes from a function of indices or from stored blocks. While
one block is computed, the next one is prefetched: `data_next` and `mask_next` say which.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.blocksparse_attention.mask_blocks import Allowed, Indices
from ejkernel.kernels.blocksparse_attention.mask_grid import (
    MaskGridLayout,
    next_active,
    next_fetch,
    partial_blocks,
    without_idle_steps,
)
from ejkernel.kernels.blocksparse_attention.masks import ComputableMask, MultiHeadMask
from ejkernel.types.block_map import FULL, PARTIAL

# A training step needs the forward and dkv form of a few masks.
_CACHE_SIZE = 12

MaskFunction = Callable[[Indices, Indices], Allowed]


class MaskInfo(NamedTuple):
    """What a block-sparse kernel needs to know of a mask while it runs.

    `data_next`, `mask_next` and `block_mask` are integer[heads_or_shards, q_blocks, kv_blocks] and
    live in the scalar memory of a TPU, which is scarce: they have the smallest of int8, int16 and
    int32 that holds them. Their first axis has one entry per head shard if the heads of each shard
    share one mask, and one per head otherwise. A shrunk grid has fewer kv (for dkv: q) blocks.

    Attributes:
        data_next: The kv block (for dkv: the q block, counted within its shard) that the next
            non-empty block of the grid needs; the block itself counts as the next one.
        mask_next: The entry of `partial_mask_blocks` that the next partial block of the grid
            needs; None if none are stored.
        block_mask: 0 where a block is empty, 1 where it is partial, 2 where it is full.
        partial_mask_blocks: bool[n, block_q, block_kv], the distinct partial blocks; None if there
            are none or the mask is given by a function. For dkv the last two axes are swapped. A
            dynamic mask has all of its blocks: bool[heads, q_blocks, kv_blocks, block_q, block_kv].
        q_sequence: int32[q_len], the index of each query, if the mask is given by a function.
        is_dynamic_mask: True if the mask is known only when the program runs, and then the leading
            axes of `partial_mask_blocks` can be sharded; None otherwise.
    """

    data_next: np.ndarray | jax.Array | None
    mask_next: np.ndarray | jax.Array | None
    block_mask: np.ndarray | jax.Array | None
    partial_mask_blocks: np.ndarray | jax.Array | None
    q_sequence: np.ndarray | None
    is_dynamic_mask: bool | None = None


def process_mask(
    mask: MultiHeadMask,
    block_shape: tuple[int, int],
    *,
    is_dkv: bool = False,
    downcast_smem_data: bool = True,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    shrink_grid: bool = True,
) -> tuple[MaskInfo, MaskFunction | None]:
    """The blocks of a mask that is known beforehand, for the forward pass.

    The result can be partitioned over heads and queries: what it says of a shard depends on
    nothing outside of it. Results are cached, and their arrays are read-only.

    Args:
        mask: One mask per head.
        block_shape: Queries and keys per block.
        is_dkv: Whether it is for the gradients of key and value.
        downcast_smem_data: Use int8 or int16 instead of int32 where they suffice.
        head_shards: Shards of the mesh over which heads are split.
        q_seq_shards: Shards of the mesh over which queries are split.
        shrink_grid: Leave out grid steps in which every row (for dkv: column) has nothing to do.
            Only where all heads share one mask.

    Returns:
        The blocks, and a hashable function `(q_ids, kv_ids) -> bool` that gives the mask at these
        indices if all heads share one mask that has a formula; None otherwise.

    Raises:
        ValueError: If the mask does not have three axes, or blocks or shards do not divide it.

    Example:
        >>> from ejkernel.kernels.blocksparse_attention.masks import CausalMask
        >>> info, mask_function = process_mask(MultiHeadMask([CausalMask((4, 4))] * 8), (2, 2))
        >>> info.block_mask.tolist()
        [[[1, 0], [2, 1]]]
        >>> bool(mask_function(1, 2))
        False
    """
    shards = (head_shards, q_seq_shards)
    return _process_static(mask, block_shape, shards, is_dkv, downcast_smem_data, shrink_grid)


def process_mask_dkv(
    mask: MultiHeadMask,
    block_shape: tuple[int, int],
    *,
    is_dkv: bool = True,
    downcast_smem_data: bool = True,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    shrink_grid: bool = True,
) -> tuple[MaskInfo, MaskFunction | None]:
    """The same as `process_mask`, for the gradients of key and value.

    Args:
        mask: One mask per head.
        block_shape: Queries and keys per block.
        is_dkv: Whether it is for the gradients of key and value.
        downcast_smem_data: Use int8 or int16 instead of int32 where they suffice.
        head_shards: Shards of the mesh over which heads are split.
        q_seq_shards: Shards of the mesh over which queries are split.
        shrink_grid: Leave out grid steps in which every column has nothing to do.

    Returns:
        The blocks, and the function of the mask or None.

    Raises:
        ValueError: If the mask does not have three axes, or blocks or shards do not divide it.

    Example:
        >>> from ejkernel.kernels.blocksparse_attention.masks import CausalMask
        >>> info, _ = process_mask_dkv(MultiHeadMask([CausalMask((4, 4))]), (2, 2))
        >>> info.data_next.tolist()
        [[[0, 0], [1, 1]]]
    """
    shards = (head_shards, q_seq_shards)
    return _process_static(mask, block_shape, shards, is_dkv, downcast_smem_data, shrink_grid)


def process_dynamic_mask(
    mask: jax.Array | np.ndarray,
    block_shape: tuple[int, int],
    *,
    is_dkv: bool = False,
    downcast_smem_data: bool = True,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    shrink_grid: bool = True,
) -> tuple[MaskInfo, None]:
    """The blocks of a mask that may be known only when the program runs; works under `jax.jit`.

    How many blocks are partial is not known beforehand, so all of them are kept, and the entries of
    `data_next` and `mask_next` are those of each block itself, 0 where it needs none.

    Args:
        mask: bool[heads, q_len, kv_len].
        block_shape: Queries and keys per block.
        is_dkv: Whether it is for the gradients of key and value.
        downcast_smem_data: Use int8 or int16 instead of int32 where they suffice in any case.
        head_shards: Shards of the mesh over which heads are split.
        q_seq_shards: Shards of the mesh over which queries are split.
        shrink_grid: Has no effect: the shape of the grid cannot depend on values.

    Returns:
        The blocks, and None.

    Raises:
        ValueError: If the mask is not of bool or does not have three axes, or if blocks or shards
            do not divide it.

    Example:
        >>> mask = jnp.tril(jnp.ones((1, 4, 4), bool))
        >>> info, _ = process_dynamic_mask(mask, (2, 2))
        >>> info.block_mask.tolist(), info.partial_mask_blocks.shape
        ([[[1, 0], [2, 1]]], (1, 2, 2, 2, 2))
    """
    shards = (head_shards, q_seq_shards)
    return _process_dynamic(mask, block_shape, shards, is_dkv, downcast_smem_data), None


def process_dynamic_mask_dkv(
    mask: jax.Array | np.ndarray,
    block_shape: tuple[int, int],
    *,
    is_dkv: bool = True,
    downcast_smem_data: bool = True,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    shrink_grid: bool = True,
) -> tuple[MaskInfo, None]:
    """The same as `process_dynamic_mask`, for the gradients of key and value.

    Args:
        mask: bool[heads, q_len, kv_len].
        block_shape: Queries and keys per block.
        is_dkv: Whether it is for the gradients of key and value.
        downcast_smem_data: Use int8 or int16 instead of int32 where they suffice in any case.
        head_shards: Shards of the mesh over which heads are split.
        q_seq_shards: Shards of the mesh over which queries are split.
        shrink_grid: Has no effect: the shape of the grid cannot depend on values.

    Returns:
        The blocks, and None.

    Raises:
        ValueError: If the mask is not of bool or does not have three axes, or if blocks or shards
            do not divide it.

    Example:
        >>> mask = jnp.tril(jnp.ones((1, 4, 6), bool))
        >>> info, _ = process_dynamic_mask_dkv(mask, (2, 3))
        >>> info.partial_mask_blocks.shape
        (1, 2, 2, 3, 2)
    """
    shards = (head_shards, q_seq_shards)
    return _process_dynamic(mask, block_shape, shards, is_dkv, downcast_smem_data), None


def _process_static(
    mask: MultiHeadMask,
    block_shape: tuple[int, int],
    shards: tuple[int, int],
    is_dkv: bool,
    downcast: bool,
    shrink_grid: bool,
) -> tuple[MaskInfo, MaskFunction | None]:
    """The blocks of a static mask, and its function; `shards` are those of heads and queries."""
    name = "process_mask_dkv" if is_dkv else "process_mask"
    blocks = _checked_blocks(name, mask.shape, block_shape, shards)
    if not isinstance(mask, MultiHeadMask):
        raise ValueError(
            f"{name}: mask must be a MultiHeadMask, got {type(mask).__name__}; "
            "an array goes to process_dynamic_mask."
        )
    return _cached(mask, MaskGridLayout(*blocks, *shards, is_dkv), downcast, shrink_grid)


def _process_dynamic(
    mask: jax.Array | np.ndarray,
    block_shape: tuple[int, int],
    shards: tuple[int, int],
    is_dkv: bool,
    downcast: bool,
) -> MaskInfo:
    """The blocks of a mask that may be traced; `shards` are those of heads and queries."""
    name = "process_dynamic_mask_dkv" if is_dkv else "process_dynamic_mask"
    if mask.dtype != jnp.bool_:
        raise ValueError(f"{name}: mask must be of bool, got {mask.dtype}.")
    block_q, block_kv = _checked_blocks(name, mask.shape, block_shape, shards)
    heads, q_len, kv_len = mask.shape
    q_blocks, kv_blocks = q_len // block_q, kv_len // block_kv
    grid = (heads, q_blocks, kv_blocks)
    head_shards, q_shards = shards
    shard = (heads // head_shards, q_blocks // q_shards, kv_blocks)

    blocks = jnp.asarray(mask).reshape(heads, q_blocks, block_q, kv_blocks, block_kv)
    blocks = blocks.swapaxes(2, 3)  # [heads, q_blocks, kv_blocks, block_q, block_kv]
    some, every = blocks.any((-2, -1)), blocks.all((-2, -1))
    # Both count within a shard.
    index = jnp.tile(jnp.arange(math.prod(shard)).reshape(shard), (head_shards, q_shards, 1))
    fetched_axis = 1 if is_dkv else 2
    fetched = lax.broadcasted_iota(jnp.int32, grid, fetched_axis) % shard[fetched_axis]

    def stored(array: jax.Array, bound: int) -> jax.Array:
        return array.astype(_smallest_type(bound) if downcast else jnp.int32)

    return MaskInfo(
        data_next=stored(jnp.where(some, fetched, 0), shard[fetched_axis]),
        mask_next=stored(jnp.where(some & ~every, index, 0), math.prod(shard)),
        block_mask=stored(some.astype(jnp.int32) + every, FULL),
        partial_mask_blocks=blocks.swapaxes(-2, -1) if is_dkv else blocks,
        q_sequence=None,
        is_dynamic_mask=True,
    )


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _cached(
    mask: MultiHeadMask, layout: MaskGridLayout, downcast: bool, shrink_grid: bool
) -> tuple[MaskInfo, MaskFunction | None]:
    numbers = {head_mask: number for number, head_mask in enumerate(dict.fromkeys(mask.masks))}
    unique = list(numbers)
    heads = np.array([numbers[head_mask] for head_mask in mask.masks])
    states = np.stack([m.block_states(layout.block_q, layout.block_kv) for m in unique])
    formula = unique[0] if len(unique) == 1 and isinstance(unique[0], ComputableMask) else None
    blocks, indices = None, np.zeros_like(states)
    if formula is None:
        blocks, indices = partial_blocks(unique, states, layout)

    states, indices = layout.spread(states, heads), layout.spread(indices, heads)
    grid = {"block_mask": states, "data_next": next_fetch(states, layout)}
    if blocks is not None:
        grid["mask_next"] = next_active(states == PARTIAL, indices, layout)
    if shrink_grid and len(unique) == 1:
        grid = without_idle_steps(grid, layout)
    arrays = {name: _stored(layout.merge_shards(array), downcast) for name, array in grid.items()}
    info = MaskInfo(
        data_next=arrays["data_next"],
        mask_next=arrays.get("mask_next"),
        block_mask=arrays["block_mask"],
        partial_mask_blocks=None if blocks is None else _read_only(blocks),
        q_sequence=None if formula is None else _read_only(formula.q_sequence),
    )
    return info, None if formula is None else formula.mask_function


def _checked_blocks(
    name: str,
    shape: tuple[int, ...],
    block_shape: tuple[int, int],
    shards: tuple[int, int],
) -> tuple[int, int]:
    """Refuse blocks and shards that do not divide the mask."""
    head_shards, q_seq_shards = shards
    if len(shape) != 3:
        raise ValueError(f"{name}: mask must be [heads, q_len, kv_len], got shape {shape}.")
    if len(block_shape) != 2:
        raise ValueError(f"{name}: block_shape must be (block_q, block_kv), got {block_shape}.")
    block_q, block_kv = block_shape
    heads, q_len, kv_len = shape
    for what, part, whole, size in (
        ("block_q", block_q, "q_len", q_len),
        ("block_kv", block_kv, "kv_len", kv_len),
        ("head_shards", head_shards, "the number of heads", heads),
        ("q_seq_shards", q_seq_shards, "q_len", q_len),
    ):
        if part <= 0 or size % part:
            raise ValueError(f"{name}: {what} must divide {whole}, got {part} and {size}.")
    if q_len // q_seq_shards % block_q:
        raise ValueError(
            f"{name}: block_q must divide the queries of a shard, "
            f"got {block_q} and {q_len // q_seq_shards}."
        )
    return block_q, block_kv


def _smallest_type(bound: int) -> np.dtype:
    """The smallest signed integer type that holds `bound`."""
    types = (np.dtype(name) for name in ("int8", "int16", "int32"))
    return next(dtype for dtype in types if bound <= np.iinfo(dtype).max)


def _stored(array: np.ndarray, downcast: bool) -> np.ndarray:
    return _read_only(array.astype(_smallest_type(int(array.max())) if downcast else np.int32))


def _read_only(array: np.ndarray) -> np.ndarray:
    # Results are cached and returned again.
    array.setflags(write=False)
    return array
