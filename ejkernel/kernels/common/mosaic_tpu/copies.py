"""Asynchronous copies between the memories of a TPU."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
from jax.experimental import pallas as pl


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
