"""The base class of masks, and masks combined with `&` and `|`."""

import abc
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Int8

from ejkernel.kernels.blocksparse_attention.mask_blocks import block_slices, block_states_of
from ejkernel.types.block_map import PARTIAL


class Mask(abc.ABC):
    """Which keys each query may see. A subclass has a `shape`, `[q, kv]`, and can be read."""

    shape: tuple[int, ...]

    @abc.abstractmethod
    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "q kv"]:
        """The part `mask[q_slice, kv_slice]`."""

    def block_states(self, block_q: int, block_kv: int) -> Int8[np.ndarray, "nq nkv"]:
        """For each block: 0 if it is empty, 1 if it is partial, 2 if it is full.

        Args:
            block_q: Queries per block; divides their number.
            block_kv: Keys per block; divides their number.
        """
        q_len, kv_len = self.shape
        strips = [
            block_states_of(self[start : start + block_q, 0:kv_len], block_q, block_kv)
            for start in range(0, q_len, block_q)
        ]
        return np.concatenate(strips)

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        check_same_shape("&", self, other)
        return LogicalAnd(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        check_same_shape("|", self, other)
        return LogicalOr(self, other)

    def __bool__(self) -> bool:
        raise NotImplementedError(
            "A mask has no truth value; masks are combined with & and |, not with `and` and `or`."
        )


@dataclass(frozen=True)
class Combination(Mask):
    """Two masks combined element by element."""

    # Of truth values the minimum is "and", the maximum "or"; so it is for the states of blocks.
    _combine: ClassVar[np.ufunc]

    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        check_same_shape(type(self).__name__, self.left, self.right)
        if len(self.left.shape) != 2:
            raise ValueError(
                f"{type(self).__name__}: masks of several heads are combined with & and |."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.left.shape

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "q kv"]:
        return self._combine(self.left[index], self.right[index])

    def block_states(self, block_q: int, block_kv: int) -> Int8[np.ndarray, "nq nkv"]:
        left = self.left.block_states(block_q, block_kv)
        right = self.right.block_states(block_q, block_kv)
        states = self._combine(left, right)
        # Two partial blocks are combined element by element; other states decide by themselves.
        for i, j in np.argwhere((left == PARTIAL) & (right == PARTIAL)).tolist():
            block = self[block_slices(i, j, block_q, block_kv)]
            states[i, j] = block_states_of(block, block_q, block_kv)[0, 0]
        return states


class LogicalAnd(Combination):
    """A query sees the keys that both masks allow; what `left & right` gives."""

    _combine = np.minimum


class LogicalOr(Combination):
    """A query sees the keys that either mask allows; what `left | right` gives."""

    _combine = np.maximum


def check_same_shape(name: str, left: Mask, right: Mask) -> None:
    if left.shape != right.shape:
        raise ValueError(
            f"{name}: masks must have the same shape, got {left.shape} and {right.shape}."
        )


def check_slices(mask: Mask, index: object) -> None:
    parts = index if isinstance(index, tuple) else ()
    if len(parts) != 2 or not all(isinstance(part, slice) for part in parts):
        raise ValueError(
            f"{type(mask).__name__}: read it as mask[q_slice, kv_slice], got {index!r}."
        )
