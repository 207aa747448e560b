"""The exact state of every block that a picture of a mask shows, found on the host."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types import mask_ids
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL
from ejkernel.types.rule_arrays import Index
from ejkernel.types.rules import Rule

if TYPE_CHECKING:
    from ejkernel.types.mask import MaskInfo

MIXED, PADDING = "mixed", "padding"

# The segment id that all tokens of a block share, or why there is none.
Label = int | Literal["mixed", "padding"]

# Pairs that are evaluated at a time.
_TILE = 1 << 22

# Into how many smaller blocks a block is divided along each axis before its pairs are evaluated.
_PARTS = 32


@dataclasses.dataclass(frozen=True)
class Drawing:
    """One head of one batch row, cut into the blocks to draw.

    Attributes:
        states: `EMPTY`, `PARTIAL` or `FULL` of each block, `[nq, nk]`.
        block_q: queries in a block.
        block_k: keys in a block.
        q_labels: segment id of each block of queries, or `MIXED` or `PADDING`.
        kv_labels: the same for the keys.
    """

    states: np.ndarray
    block_q: int
    block_k: int
    q_labels: list[Label]
    kv_labels: list[Label]


def draw(mask: "MaskInfo", batch: int, head: int, block_q: int, block_k: int) -> Drawing:
    """The blocks of one head of one batch row of a `MaskInfo`."""
    rule = mask.rule.row(batch).head(head)
    q_ids, kv_ids = (np.asarray(jnp.atleast_2d(ids)[batch]) for ids in mask_ids.reported(mask))
    return Drawing(
        block_states(rule, mask.q_len, mask.kv_len, block_q, block_k),
        block_q,
        block_k,
        block_labels(q_ids, block_q),
        block_labels(kv_ids, block_k),
    )


def block_states(rule: Rule, q_len: int, kv_len: int, block_q: int, block_k: int) -> np.ndarray:
    """Whether all, some or none of the pairs of each block are allowed.

    The block bounds of a rule are certain for empty and full blocks. The pairs of the others are
    evaluated, one block at a time.
    """
    some, every = (
        np.array(bound.reshape(bound.shape[-2:]))
        for bound in _blocks(rule, q_len, kv_len, block_q, block_k)
    )
    for i, j in np.argwhere(some & ~every):
        q_start, k_start = int(i) * block_q, int(j) * block_k
        q_size, k_size = min(block_q, q_len - q_start), min(block_k, kv_len - k_start)
        some[i, j], every[i, j] = _some_and_every(rule, q_start, q_size, k_start, k_size)
    return np.where(every, FULL, np.where(some, PARTIAL, EMPTY)).astype(np.int8)


def coarse_states(
    rule: Rule, q_len: int, kv_len: int, block_q: int, block_k: int, parts: tuple[int, int]
) -> np.ndarray:
    """The state of each block from what the rules say about its parts; no pair is looked at.

    The work depends on the number of blocks alone, not on the lengths. A block is certainly full or
    empty where it is called so; one that is called partial may be full or empty if every one of its
    parts is in doubt, which needs a boundary of the mask in each of them.

    Args:
        rule: the mask of one head of one batch row.
        q_len: number of queries.
        kv_len: number of keys.
        block_q: queries in a block.
        block_k: keys in a block.
        parts: into how many parts a block is cut, along queries and keys; divisors of its sizes.
    """
    rows, columns = parts
    sizes = -(-q_len // block_q), rows, -(-kv_len // block_k), columns
    some, every = (
        np.array(bound.reshape(bound.shape[-2:]))
        for bound in _blocks(rule, q_len, kv_len, block_q // rows, block_k // columns)
    )
    is_active = _in_parts(some, sizes, beyond=False).any((1, 3))
    is_full = _in_parts(every, sizes, beyond=True).all((1, 3))
    return np.where(is_full, FULL, np.where(is_active, PARTIAL, EMPTY)).astype(np.int8)


def _in_parts(bound: np.ndarray, sizes: tuple[int, int, int, int], beyond: bool) -> np.ndarray:
    """`[nq, rows, nk, columns]`; parts beyond the last query or key count as `beyond`."""
    missing_rows = sizes[0] * sizes[1] - bound.shape[0]
    missing_columns = sizes[2] * sizes[3] - bound.shape[1]
    padding = ((0, missing_rows), (0, missing_columns))
    return np.pad(bound, padding, constant_values=beyond).reshape(sizes)


def block_labels(ids: np.ndarray, block: int) -> list[Label]:
    """The id that all tokens of each block share; `MIXED` or `PADDING` where there is none."""
    labels: list[Label] = []
    for start in range(0, len(ids), block):
        values = np.unique(np.maximum(ids[start : start + block], -1))
        labels.append(MIXED if len(values) > 1 else PADDING if values[0] < 0 else int(values[0]))
    return labels


def _some_and_every(
    rule: Rule, q_start: int, q_len: int, k_start: int, k_len: int
) -> tuple[bool, bool]:
    """Whether some and whether every pair of a rectangle is allowed."""
    # A smaller block that is certainly full and one that is certainly empty settle it.
    if min(q_len, k_len) >= 2 * _PARTS:
        has_full, has_empty = _inner_blocks(rule, q_start, q_len, k_start, k_len)
        if has_full and has_empty:
            return True, False
    rows = max(1, min(q_len, _TILE // k_len))
    some, every = False, True
    for start in range(0, q_len, rows):
        size = min(rows, q_len - start)
        any_pair, all_pairs = _pairs(rule, q_start + start, size, k_start, k_len)
        some, every = some or bool(any_pair), every and bool(all_pairs)
        if some and not every:
            break
    return some, every


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _blocks(
    rule: Rule, q_len: int, kv_len: int, block_q: int, block_k: int
) -> tuple[jax.Array, jax.Array]:
    return rule.blocks(q_len, kv_len, block_q, block_k)


@functools.partial(jax.jit, static_argnums=(2, 4))
def _pairs(
    rule: Rule, q_start: Index, q_len: int, k_start: Index, k_len: int
) -> tuple[jax.Array, jax.Array]:
    dense = rule.slice(q_start, q_len, k_start, k_len).dense(q_len, k_len)
    return dense.any(), dense.all()


@functools.partial(jax.jit, static_argnums=(2, 4))
def _inner_blocks(
    rule: Rule, q_start: Index, q_len: int, k_start: Index, k_len: int
) -> tuple[jax.Array, jax.Array]:
    part = rule.slice(q_start, q_len, k_start, k_len)
    some, every = part.blocks(q_len, k_len, q_len // _PARTS, k_len // _PARTS)
    return every.any(), ~some.all()
