"""Attention masks that are known before anything runs.

A mask says for each query and each key whether the query may see the key. It is immutable and
hashable, so that what is computed from it can be cached. Masks are combined with `&` and `|`, and
`MultiHeadMask` gives each head its own.

Reading `mask[q_slice, kv_slice]` gives that part as a NumPy array. `mask.block_states(...)` says
of each block whether it is empty, partial or full; masks with a formula answer from the corners
of the block, so that long sequences cost as much as they have blocks.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Int8

from ejkernel.kernels.blocksparse_attention.mask_base import (
    Combination,
    check_same_shape,
    check_slices,
)
from ejkernel.kernels.blocksparse_attention.mask_base import LogicalAnd as LogicalAnd
from ejkernel.kernels.blocksparse_attention.mask_base import LogicalOr as LogicalOr
from ejkernel.kernels.blocksparse_attention.mask_base import Mask as Mask
from ejkernel.kernels.blocksparse_attention.mask_blocks import (
    Allowed,
    BandFunction,
    ChunkFunction,
    Indices,
)
from ejkernel.types.block_map import FULL


class ComputableMask(Mask):
    """A mask with a formula: `mask_function(q_ids, kv_ids)` gives the values at these indices.

    Kernels evaluate the function where a block is partial, instead of reading stored blocks.
    """

    shape: tuple[int, int]

    @property
    @abc.abstractmethod
    def mask_function(self) -> Callable[[Indices, Indices], Allowed]:
        """A hashable function of two index arrays that broadcast, NumPy or JAX."""

    @property
    def q_sequence(self) -> np.ndarray:
        """The index of each query."""
        return np.arange(self.shape[0], dtype=np.int32)

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "q kv"]:
        q_ids, kv_ids = _read_indices(self, index)
        return np.asarray(self.mask_function(q_ids[:, None], kv_ids[None, :]))


class _FormulaMask(ComputableMask):
    """A computable mask whose function knows the states of blocks."""

    shard_count: int

    @property
    @abc.abstractmethod
    def mask_function(self) -> BandFunction | ChunkFunction: ...

    def __post_init__(self) -> None:
        name = type(self).__name__
        object.__setattr__(self, "shape", _checked_shape(name, self.shape))
        if self.shard_count <= 0 or self.shape[0] % self.shard_count**2:
            raise ValueError(
                f"{name}: the number of queries must be a multiple of shard_count squared, "
                f"got {self.shape[0]} and shard_count={self.shard_count}."
            )

    def block_states(self, block_q: int, block_kv: int) -> Int8[np.ndarray, "nq nkv"]:
        q_start = np.arange(0, self.shape[0], block_q)[:, None]
        kv_start = np.arange(0, self.shape[1], block_kv)[None, :]
        return self.mask_function.block_states(
            q_start, q_start + block_q - 1, kv_start, kv_start + block_kv - 1
        )


@dataclass(frozen=True)
class CausalMask(_FormulaMask):
    """A query sees the keys up to its own index: `k <= q + offset`.

    Args:
        shape: `(q_len, kv_len)`.
        offset: How far a query sees beyond its index.
        shard_count: In how many shards the queries will be split; the number of queries must be a
            multiple of its square. Nothing else depends on it.

    Example:
        >>> CausalMask((2, 4), offset=1)[:, :].astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 1, 0]]
    """

    shape: tuple[int, int]
    offset: int = 0
    shard_count: int = field(default=1, compare=False)

    @property
    def mask_function(self) -> BandFunction:
        return BandFunction(None, self.offset)


@dataclass(frozen=True)
class LocalMask(_FormulaMask):
    """A query sees the keys of a window: `q + offset - left <= k <= q + offset + right`.

    Args:
        shape: `(q_len, kv_len)`.
        window_size: `(left, right)`; None is no bound on that side.
        offset: How far the window is moved from the index of the query.
        shard_count: In how many shards the queries will be split; the number of queries must be a
            multiple of its square. Nothing else depends on it.

    Example:
        >>> LocalMask((2, 4), window_size=(1, 0), offset=1)[:, :].astype(int).tolist()
        [[1, 1, 0, 0], [0, 1, 1, 0]]
    """

    shape: tuple[int, int]
    window_size: tuple[int | None, int | None]
    offset: int = 0
    shard_count: int = field(default=1, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.window_size) != 2:
            raise ValueError(
                f"LocalMask: window_size must be (left, right), got {self.window_size}."
            )
        object.__setattr__(self, "window_size", tuple(self.window_size))

    @property
    def mask_function(self) -> BandFunction:
        left, right = self.window_size
        low = None if left is None else self.offset - left
        return BandFunction(low, None if right is None else self.offset + right)


@dataclass(frozen=True)
class ChunkedCausalMask(_FormulaMask):
    """A query sees the keys of its own chunk up to its index: `k // c == q // c` and `k <= q`.

    Args:
        shape: `(q_len, kv_len)`.
        chunk_size: The length of a chunk.
        shard_count: In how many shards the queries will be split; the number of queries must be a
            multiple of its square. Nothing else depends on it.

    Example:
        >>> ChunkedCausalMask((3, 4), chunk_size=2)[:, :].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]]
    """

    shape: tuple[int, int]
    chunk_size: int
    shard_count: int = field(default=1, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_size <= 0:
            raise ValueError(
                f"ChunkedCausalMask: chunk_size must be positive, got {self.chunk_size}."
            )

    @property
    def mask_function(self) -> ChunkFunction:
        return ChunkFunction(self.chunk_size)


@dataclass(frozen=True)
class FullMask(Mask):
    """Every query sees every key.

    Example:
        >>> FullMask((2, 3))[:, 1:].shape
        (2, 2)
    """

    _shape: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_shape", _checked_shape("FullMask", self._shape))

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "q kv"]:
        q_ids, kv_ids = _read_indices(self, index)
        return np.ones((q_ids.size, kv_ids.size), bool)

    def block_states(self, block_q: int, block_kv: int) -> Int8[np.ndarray, "nq nkv"]:
        return np.full((self.shape[0] // block_q, self.shape[1] // block_kv), FULL, np.int8)


@dataclass(frozen=True, eq=False)
class NumpyMask(Mask):
    """A mask given as an array, of which it keeps a copy.

    Example:
        >>> NumpyMask(np.eye(3, dtype=bool))[1:, :].astype(int).tolist()
        [[0, 1, 0], [0, 0, 1]]
    """

    array: np.ndarray

    def __post_init__(self) -> None:
        array = np.array(self.array)
        _checked_shape("NumpyMask", array.shape)
        if array.dtype != np.bool_:
            raise ValueError(f"NumpyMask: the array must be of bool, got {array.dtype}.")
        array.setflags(write=False)
        object.__setattr__(self, "array", array)

    @property
    def shape(self) -> tuple[int, int]:
        return self.array.shape

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "q kv"]:
        check_slices(self, index)
        return self.array[index]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shape, np.packbits(self.array).tobytes()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NumpyMask):
            return NotImplemented
        return self is other or np.array_equal(self.array, other.array)


@dataclass(frozen=True)
class MultiHeadMask(Mask):
    """One mask for each head, all of the same shape; together `[heads, q, kv]`.

    Example:
        >>> MultiHeadMask([CausalMask((4, 4)), FullMask((4, 4))]).shape
        (2, 4, 4)
    """

    masks: Sequence[Mask]

    def __post_init__(self) -> None:
        object.__setattr__(self, "masks", tuple(self.masks))
        if not self.masks:
            raise ValueError("MultiHeadMask: at least one mask is needed.")
        for mask in self.masks:
            if isinstance(mask, MultiHeadMask):
                raise ValueError("MultiHeadMask: a mask of several heads cannot be a head itself.")
            if mask.shape != self.masks[0].shape:
                raise ValueError(
                    "MultiHeadMask: all masks must have one shape, "
                    f"got {self.masks[0].shape} and {mask.shape}."
                )

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.masks), *self.masks[0].shape)

    def __getitem__(self, index: tuple[int | slice, slice, slice]) -> np.ndarray:
        """The part `mask[head, q_slice, kv_slice]`; a slice of heads keeps their axis."""
        if not isinstance(index, tuple) or len(index) != 3:
            raise ValueError(
                f"MultiHeadMask: read it as mask[head, q_slice, kv_slice], got {index!r}."
            )
        head, q_slice, kv_slice = index
        if isinstance(head, slice):
            return np.stack([mask[q_slice, kv_slice] for mask in self.masks[head]])
        return self.masks[head][q_slice, kv_slice]

    def block_states(self, block_q: int, block_kv: int) -> Int8[np.ndarray, "heads nq nkv"]:
        return np.stack([mask.block_states(block_q, block_kv) for mask in self.masks])

    def __and__(self, other: Mask) -> "MultiHeadMask":
        return self._combined("&", other, LogicalAnd)

    def __or__(self, other: Mask) -> "MultiHeadMask":
        return self._combined("|", other, LogicalOr)

    def _combined(self, symbol: str, other: Mask, combine: type[Combination]) -> "MultiHeadMask":
        check_same_shape(symbol, self, other)
        if not isinstance(other, MultiHeadMask):
            raise ValueError(f"{symbol}: a mask of several heads is combined with another one.")
        return MultiHeadMask([combine(*pair) for pair in zip(self.masks, other.masks, strict=True)])


def make_causal_mask(shape: tuple[int, int], offset: int = 0) -> Bool[np.ndarray, "q kv"]:
    """The dense array of a `CausalMask`.

    Example:
        >>> make_causal_mask((2, 3)).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0]]
    """
    return CausalMask(shape, offset)[:, :]


def make_local_attention_mask(
    shape: tuple[int, int], window_size: tuple[int | None, int | None], *, offset: int = 0
) -> Bool[np.ndarray, "q kv"]:
    """The dense array of a `LocalMask`.

    Example:
        >>> make_local_attention_mask((3, 3), (1, 0)).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    return LocalMask(shape, window_size, offset)[:, :]


def make_chunk_attention_mask(shape: tuple[int, int], chunk_size: int) -> Bool[np.ndarray, "q kv"]:
    """The dense array of a `ChunkedCausalMask`.

    Example:
        >>> make_chunk_attention_mask((3, 3), 2).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    return ChunkedCausalMask(shape, chunk_size)[:, :]


def make_random_mask(
    shape: tuple[int, int], sparsity: float, seed: int
) -> Bool[np.ndarray, "q kv"]:
    """A random array in which each entry is False with probability `sparsity`.

    The same seed gives the same array, and NumPy's global generator is left alone.

    Example:
        >>> make_random_mask((2, 3), sparsity=1.0, seed=0).any()
        np.False_
    """
    if not 0.0 <= sparsity <= 1.0:
        raise ValueError(f"make_random_mask: sparsity must lie in [0, 1], got {sparsity}.")
    generator = np.random.RandomState(seed)
    return generator.binomial(1, 1.0 - sparsity, shape).astype(bool)


def _checked_shape(name: str, shape: Sequence[int]) -> tuple[int, int]:
    if not isinstance(shape, Sequence) or len(shape) != 2 or min(shape) <= 0:
        raise ValueError(f"{name}: shape must be (q_len, kv_len), both positive, got {shape}.")
    return int(shape[0]), int(shape[1])


def _read_indices(mask: Mask, index: tuple[slice, slice]) -> tuple[np.ndarray, np.ndarray]:
    """The query and key indices that two slices select."""
    check_slices(mask, index)
    bounds = (part.indices(size) for part, size in zip(index, mask.shape, strict=True))
    q_ids, kv_ids = (np.arange(*bound, dtype=np.int32) for bound in bounds)
    return q_ids, kv_ids
