"""Timing side by side, checking before timing, and the memory of a compiled program."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike


class WrongResultError(Exception):
    """A result that must not be timed, because it is not the right one."""


class Memory(NamedTuple):
    """Bytes that a compiled program needs."""

    arguments: int
    outputs: int
    temporary: int

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs + self.temporary


def memory(compiled: jax.stages.Compiled) -> Memory:
    """What the compiler planned for one run of a program."""
    used: Any = compiled.memory_analysis()
    return Memory(used.argument_size_in_bytes, used.output_size_in_bytes, used.temp_size_in_bytes)


def interleaved(*calls: Callable[[], Any], rounds: int, warmup: int = 1) -> list[float]:
    """Seconds of the fastest run of each call; interleaved, so that noise affects all alike.

    Each runs once more before it is timed: what the one before has left in the caches, and taken
    from the allocator, is not counted against it.
    """
    for call in calls:
        for _ in range(warmup):
            jax.block_until_ready(call())
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for index, call in enumerate(calls):
            jax.block_until_ready(call())
            began = time.perf_counter()
            jax.block_until_ready(call())
            best[index] = min(best[index], time.perf_counter() - began)
    return best


def alternating(*calls: Callable[[], Any], seconds: float) -> list[float]:
    """Seconds of the fastest run of each call; they alternate for this long, twice at least.

    Every call has run before: nothing is compiled or loaded while the clock runs.
    """
    best = [float("inf")] * len(calls)
    rounds, end = 0, time.perf_counter() + seconds
    while rounds < 2 or time.perf_counter() < end:
        for index, call in enumerate(calls):
            began = time.perf_counter()
            jax.block_until_ready(call())
            best[index] = min(best[index], time.perf_counter() - began)
        rounds += 1
    return best


def check_close(actual: ArrayLike, expected: ArrayLike, *, ulps: int) -> None:
    """Raise unless the difference is within `ulps` eps (float32) of the largest value."""
    actual, expected = np.asarray(actual), np.asarray(expected, np.float64)
    allowed = ulps * np.finfo(np.float32).eps * np.abs(expected).max()
    error = np.abs(actual.astype(np.float64) - expected).max()
    if not error <= allowed:
        raise WrongResultError(f"off by {error:.2e} where {allowed:.2e} is allowed")
