"""Programs that are compiled together, within a time, and timed one by one."""

import concurrent.futures
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np


def seconds_of(run: Callable, *args: Any, samples: int = 5, at_least: float = 0.03) -> float:
    """Seconds of one call among many back to back; the median of several samples."""
    jax.block_until_ready(run(*args))

    def sample(repeats: int) -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            out = run(*args)
        jax.block_until_ready(out)
        return (time.perf_counter() - begin) / repeats

    repeats = max(3, int(at_least / max(sample(3), 1e-6)))
    return float(np.median([sample(repeats) for _ in range(samples)]))


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` after so many seconds, as soon as Python is asked."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Programs:
    """Programs that are traced one after the other and compiled at the same time."""

    def __init__(self, limit: float):
        self._limit = limit
        self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1)
        self._found: dict[Any, Any] = {}

    def add(self, name: Any, lower: Callable, **options: Any) -> None:
        try:
            with within(self._limit):
                lowered = lower()
            self._found[name] = self._pool.submit(lowered.compile, options or None)
        except Exception as failure:
            self._found[name] = failure

    def wait(self) -> None:
        """Until all are compiled, so that none is timed while the device tries another."""
        futures = [x for x in self._found.values() if isinstance(x, concurrent.futures.Future)]
        concurrent.futures.wait(futures, timeout=self._limit)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __getitem__(self, name: Any) -> Callable:
        found = self._found[name]
        if isinstance(found, Exception):
            raise found
        return found.result(timeout=0.0)
