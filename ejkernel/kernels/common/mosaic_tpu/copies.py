"""Asynchronous copies between the memories of a TPU."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.common.refs import Ref


@runtime_checkable
class AsyncCopy(Protocol):
    """What `pltpu.make_async_copy` returns: a copy by DMA."""

    def start(self) -> Any: ...

    def wait(self) -> Any: ...


def for_each_chunk(count: jax.Array, most: int, act: Callable[[jax.Array, int], None]) -> None:
    """`act(offset, size)` for chunks of `count` rows, at most `most`, whose sizes are static.

    A copy has a static size: a traced number of rows is copied by its binary digits.
    """
    for bit in reversed(range(most.bit_length())):
        size = 1 << bit

        @pl.when((count & size) != 0)
        def _(size: int = size):
            act(count & ~(2 * size - 1), size)


class RowCopies(NamedTuple):
    """The copies of a tile's rows between HBM and its stage in VMEM, in chunks."""

    row: jax.Array
    rows: jax.Array
    stage: jax.Array
    array: Ref
    tiles: Ref
    semaphore: Ref
    to_hbm: bool = False

    def start(self) -> None:
        self._for_each(lambda copy: copy.start())

    def wait(self) -> None:
        self._for_each(lambda copy: copy.wait())

    def _for_each(self, act: Callable[[AsyncCopy], None]) -> None:
        def one(offset: jax.Array, size: int) -> None:
            in_hbm = self.array.at[pl.ds(self.row + offset, size)]
            in_vmem = self.tiles.at[self.stage, pl.ds(offset, size)]
            ends = (in_vmem, in_hbm) if self.to_hbm else (in_hbm, in_vmem)
            act(pltpu.make_async_copy(*ends, self.semaphore))

        for_each_chunk(self.rows, min(self.tiles.shape[1], self.array.shape[0]), one)
