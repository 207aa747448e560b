"""Arrays of a Pallas TPU kernel, with the block of them that a step reads or writes."""

from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike


class BlockOperand(NamedTuple):
    """An array that a kernel reads, and the block of it that a step gets."""

    array: jax.Array
    spec: pl.BlockSpec


class BlockResult(NamedTuple):
    """An array that a kernel writes, and the block of it that a step writes.

    `zeroed`: it is 0 where no step writes.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    spec: pl.BlockSpec
    zeroed: bool = False
