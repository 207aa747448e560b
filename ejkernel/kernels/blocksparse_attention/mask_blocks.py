"""Which blocks of a mask are empty, partial or full: from its values, or from its formula."""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Bool, Int8

# Indices of queries or keys that broadcast, and which pairs of them a mask allows.
Indices = int | np.integer | np.ndarray | jax.Array
Allowed = bool | np.bool_ | np.ndarray | jax.Array


def block_slices(i: int, j: int, block_q: int, block_kv: int) -> tuple[slice, slice]:
    """The queries and keys of block (i, j)."""
    q_start, kv_start = i * block_q, j * block_kv
    return slice(q_start, q_start + block_q), slice(kv_start, kv_start + block_kv)


def block_states_of(
    dense: Bool[np.ndarray, "q kv"], block_q: int, block_kv: int
) -> Int8[np.ndarray, "nq nkv"]:
    """The states of the blocks of a dense mask."""
    q_len, kv_len = dense.shape
    blocks = dense.reshape(q_len // block_q, block_q, kv_len // block_kv, block_kv)
    return _states(blocks.any(axis=1).any(axis=-1), blocks.all(axis=1).all(axis=-1))


@dataclass(frozen=True)
class BandFunction:
    """Allows key k to query q if `low <= k - q <= high`; None is no bound."""

    low: int | None
    high: int | None

    def __call__(self, q_ids: Indices, kv_ids: Indices) -> Allowed:
        distance = kv_ids - q_ids
        allowed = distance == distance  # True everywhere, whether NumPy, JAX or in a kernel.
        if self.low is not None:
            allowed &= distance >= self.low
        if self.high is not None:
            allowed &= distance <= self.high
        return allowed

    def block_states(
        self,
        q_start: np.ndarray,
        q_last: np.ndarray,
        kv_start: np.ndarray,
        kv_last: np.ndarray,
    ) -> np.ndarray:
        """The states of blocks given by their first and last indices."""
        # A block holds every distance between these two.
        least, most = kv_start - q_last, kv_last - q_start
        low = self.low if self.low is not None else least
        high = self.high if self.high is not None else most
        some = np.maximum(least, low) <= np.minimum(most, high)
        return _states(some, (low <= least) & (most <= high))


@dataclass(frozen=True)
class ChunkFunction:
    """Allows key k to query q if both are in the same chunk of `size` and `k <= q`."""

    size: int

    def __call__(self, q_ids: Indices, kv_ids: Indices) -> Allowed:
        return (q_ids // self.size == kv_ids // self.size) & (q_ids >= kv_ids)

    def block_states(
        self,
        q_start: np.ndarray,
        q_last: np.ndarray,
        kv_start: np.ndarray,
        kv_last: np.ndarray,
    ) -> np.ndarray:
        """The states of blocks given by their first and last indices."""
        first = np.maximum(q_start // self.size, kv_start // self.size)
        last = np.minimum(q_last // self.size, kv_last // self.size)
        # Of one shared chunk, compare the last query with the first key. Two shared chunks meet
        # at an index that is both a query and a key of the block, and that one sees itself.
        last_query = np.minimum(q_last, (first + 1) * self.size - 1)
        first_key = np.maximum(kv_start, first * self.size)
        some = (first < last) | ((first == last) & (last_query >= first_key))
        one_chunk = kv_start // self.size == q_last // self.size
        every = one_chunk & (kv_last <= q_start)
        return _states(some, every)


def _states(some: np.ndarray | np.bool_, every: np.ndarray | np.bool_) -> np.ndarray:
    """EMPTY, PARTIAL or FULL from whether some and whether all pairs of a block are allowed."""
    return np.asarray(some, np.int8) + np.asarray(every, np.int8)
