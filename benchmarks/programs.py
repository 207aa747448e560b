"""Programs that are compiled together, within a time, and timed interleaved."""

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax


def seconds_of(run: Callable, at_least: float = 0.03) -> float:
    """Seconds of one call among many back to back, all of which are queued before one wait."""
    begin = time.perf_counter()
    jax.block_until_ready([run() for _ in range(2)])
    repeats = max(2, min(200, int(at_least / max((time.perf_counter() - begin) / 2, 1e-6))))
    begin = time.perf_counter()
    for _ in range(repeats):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - begin) / repeats


def torch_seconds_of(run: Callable, at_least: float = 0.03) -> float:
    """The same of a call of torch, by its events."""
    import torch  # type: ignore[import-not-found]

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def several(count: int) -> float:
        begin.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    return several(max(2, min(200, int(at_least / max(several(2), 1e-6)))))


def interleaved(timers: dict[Any, Callable[[], float]], rounds: int = 5) -> dict[Any, list[float]]:
    """Seconds by each timer, several times, in ascending order.

    A card that has been busy for a second runs slower than one that has not, so the timings
    of all programs are interleaved.
    """
    found: dict[Any, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            found[name].append(timer())
    return {name: sorted(seconds) for name, seconds in found.items()}


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


def by_workers(script: str, names: list[str], chosen: Any) -> Iterator[dict[str, Any]]:
    """The reports of several processes, each with some of the cases, whenever they may have grown.

    All compile at the same time; `--lock` is a file that whoever uses the device holds meanwhile.
    """
    rest = [f"--{name}={value}" for name, value in vars(chosen).items() if _said(name, value)]
    rest += [f"--{name}" for name, value in vars(chosen).items() if value is True]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        parts = [names[i :: chosen.workers] for i in range(chosen.workers)]
        workers = []
        for i, some in enumerate(filter(None, parts)):
            own = [
                f"--cases={','.join(some)}",
                f"--json={folder}/{i}.json",
                f"--lock={folder}/lock",
            ]
            command = [sys.executable, "-u", script, *rest, *own]
            workers.append(subprocess.Popen(command, env=environment))
        done = False
        while not done:
            time.sleep(0.5)
            done = all(worker.poll() is not None for worker in workers)
            for part in Path(folder).glob("*.json"):
                with contextlib.suppress(json.JSONDecodeError):  # it is being written
                    yield json.loads(part.read_text())


def _said(name: str, value: Any) -> bool:
    own = ("workers", "cases", "json", "lock")
    return name not in own and not isinstance(value, bool) and value is not None


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
