"""From static masks, and from masks of blocks, to rules."""

import operator
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ejkernel.kernels.blocksparse_attention.masks import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    LogicalAnd,
    LogicalOr,
    Mask,
    MultiHeadMask,
)
from ejkernel.kernels.common.arguments import as_array
from ejkernel.kernels.common.masking import Extent
from ejkernel.types.arguments import boolean
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL
from ejkernel.types.rules import And, Band, Blocks, Chunks, Dense, Everything, Or, Rule

_NAME = "blocksparse_attention"


def block_sizes(size: int | tuple[int, int]) -> tuple[int, int]:
    """Queries and keys of a block, from one number or a pair."""
    try:
        pair = size if isinstance(size, tuple | list) else (size, size)
        block_q, block_k = (operator.index(x) for x in pair)
    except (TypeError, ValueError):
        raise ValueError(
            f"{_NAME}: block_size must be an int or a pair of ints, got {size!r}."
        ) from None
    if block_q < 1 or block_k < 1:
        raise ValueError(f"{_NAME}: block_size must be positive, got {size!r}.")
    return block_q, block_k


def rule_of_blocks(block_mask: ArrayLike, size: int | tuple[int, int], extent: Extent) -> Rule:
    """The rule of a block mask [nq, nk], [heads, nq, nk] or [batch, 1 or heads, nq, nk]."""
    block_q, block_k = block_sizes(size)
    mask = given = as_array(_NAME, "block_mask", block_mask)
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    grid = (-(-extent.queries // block_q), -(-extent.keys // block_k))
    fits = given.ndim in (2, 3, 4) and mask.shape[2:] == grid
    if not (fits and mask.shape[0] in (1, extent.batch) and mask.shape[1] in (1, extent.heads)):
        raise ValueError(
            f"{_NAME}: block_mask must have shape {list(grid)}, [heads, ...] or [batch, heads, "
            f"...] for blocks of {block_q} x {block_k}, got {list(given.shape)}."
        )
    return Blocks(boolean(f"{_NAME}: block_mask", mask), block_q, block_k)


def rule_of_builder(
    builder: Callable[..., Mask], size: int | tuple[int, int], extent: Extent, group: int
) -> Rule:
    """The rule of the masks that `builder` makes, one for each query head."""
    if not callable(builder):
        raise ValueError(f"{_NAME}: mask_builder must be a function, got {builder!r}.")
    masks: list[Mask] = []
    for head in range(extent.heads):
        mask = builder(extent.queries, extent.keys, extent.heads, head, group)
        if not isinstance(mask, Mask):
            raise ValueError(
                f"{_NAME}: mask_builder must return a Mask, got {type(mask).__name__}."
            )
        if isinstance(mask, MultiHeadMask):
            masks = list(mask.masks)
            break
        masks.append(mask)
    for mask in masks:
        if mask.shape != (extent.queries, extent.keys):
            raise ValueError(
                f"{_NAME}: mask_builder gave a mask of {mask.shape} for "
                f"{(extent.queries, extent.keys)} queries and keys."
            )
    if len(masks) != extent.heads:
        raise ValueError(
            f"{_NAME}: mask_builder gave masks of {len(masks)} heads for {extent.heads}."
        )
    if all(mask == masks[0] for mask in masks):
        masks = masks[:1]
    return _rule_of_heads(masks, *block_sizes(size))


def rule_of_mask(mask: Mask) -> Rule:
    """The rule that says the same as a mask."""
    match mask:
        case FullMask():
            return Everything()
        case CausalMask(offset=offset):
            return Band(None, offset)
        case LocalMask(window_size=(left, right), offset=offset):
            low = None if left is None else offset - left
            return Band(low, None if right is None else offset + right)
        case ChunkedCausalMask(chunk_size=size):
            return And((Chunks(size), Band(None, 0)))
        case LogicalAnd(left=left, right=right):
            return rule_of_mask(left) & rule_of_mask(right)
        case LogicalOr(left=left, right=right):
            return Or((rule_of_mask(left), rule_of_mask(right)))
    return Dense(jnp.asarray(mask[:, :])[None, None])


def _rule_of_heads(masks: Sequence[Mask], block_q: int, block_k: int) -> Rule:
    """The rule of one mask for all heads or of one for each: a formula, by blocks, or by pairs."""
    formulas = all(map(_has_formula, masks))
    if formulas and len(masks) == 1:
        return rule_of_mask(masks[0])
    queries, keys = masks[0].shape
    states = None
    if queries % block_q == 0 and keys % block_k == 0:
        states = np.stack([mask.block_states(block_q, block_k) for mask in masks])
        if not (states == PARTIAL).any():
            return Blocks(jnp.asarray(states == FULL)[None], block_q, block_k)
    if formulas:
        return _union_over_heads(masks)
    pairs = Dense(jnp.asarray(np.stack([mask[:, :] for mask in masks]))[None])
    if states is None or (states != EMPTY).mean() > 0.5:
        return pairs
    # With the block mask, kernels visit only the blocks that are not empty.
    return Blocks(jnp.asarray(states != EMPTY)[None], block_q, block_k) & pairs


def _union_over_heads(masks: Sequence[Mask]) -> Rule:
    """A union of formulas, each for the heads that have it: no array of queries by keys."""
    rules = []
    for one in dict.fromkeys(masks):
        heads = jnp.asarray([mask == one for mask in masks])
        rules.append(Dense(heads[None, :, None, None]) & rule_of_mask(one))
    return Or(tuple(rules))


def _has_formula(mask: Mask) -> bool:
    """Whether its rule needs no array of queries by keys."""
    if isinstance(mask, LogicalAnd | LogicalOr):
        return _has_formula(mask.left) and _has_formula(mask.right)
    return isinstance(mask, FullMask | CausalMask | LocalMask | ChunkedCausalMask)
