"""Timing a function on the device, also from within a trace."""

import contextvars
import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from ejkernel.ops.platform import device_of

_Result = TypeVar("_Result")

# A sample shorter than this is mostly the clock; on an accelerator, which the host waits for,
# mostly the launch and the wait.
_SAMPLE_SECONDS = 2e-3
_SAMPLE_SECONDS_AWAY = 20e-3
_MOST_REPEATS = 200
_LEAST_SAMPLES = 5  # of which a median and its uncertainty say something
_NOISE = 0.02  # of the median of fewer samples, whose spread says too little


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Seconds of one call: the best sample, the median one and how well that is known."""

    best: float
    median: float
    uncertainty: float = 0.0  # half the width of an interval that holds the median

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Measurement":
        """The statistics of these samples, in seconds."""
        if len(samples) < _LEAST_SAMPLES:
            median = statistics.median(samples)
            return cls(min(samples), median, max(_NOISE * median, max(samples) - median))
        first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
        # The notches of a box plot: a 95 % interval of the median.
        return cls(min(samples), median, 1.57 * (third - first) / math.sqrt(len(samples)))


def measure(fn: Callable[..., Any], *args: object, warmup: int = 1, iters: int = 3) -> Measurement:
    """Time `fn(*args)` to the end of its computation.

    Args:
        fn: The function, compiled by its first call; jit it beforehand.
        args: Its arguments.
        warmup: Calls before the clock starts.
        iters: Samples; one sample of a short function is the mean of several calls.

    Raises:
        ValueError: `warmup` is negative or `iters` below one.

    >>> measure(jax.jit(lambda x: x + 1), 1.0).best < 1.0
    True
    """
    if warmup < 0 or iters < 1:
        raise ValueError(
            f"measure: warmup must be at least 0 and iters at least 1, got {warmup} and {iters}."
        )
    for _ in range(warmup):
        jax.block_until_ready(fn(*args))
    sampler, first = _Sampler.of(fn, args)
    samples = [first] if sampler.repeats == 1 else []
    while len(samples) < iters:
        samples.append(sampler())
    return Measurement(best=min(samples), median=statistics.median(samples))


def interleaved(
    functions: Sequence[Callable[..., Any]], args: tuple[Any, ...], seconds: float
) -> list[Measurement]:
    """Time several functions of the same arguments, their samples interleaved.

    A device that warms up or slows down does so for all of them. Sampling stops as soon as the
    intervals that hold the medians no longer overlap, for which each function needs five samples,
    at the latest after `seconds` and one sample of each. A function that is three times slower than
    the fastest has one.

    Args:
        functions: compiled.
        args: their arguments.
        seconds: for all functions together.
    """
    start = time.perf_counter()
    samplers, firsts = zip(*(_Sampler.of(fn, args) for fn in functions), strict=True)
    samples = [[first] for first in firsts]
    near = [i for i, first in enumerate(firsts) if first <= 3 * min(firsts)]
    for i in near:
        if samplers[i].repeats > 1:
            samples[i].clear()  # of one short call, which is mostly launching and waiting
    while True:
        for i in near:
            if not samples[i] or time.perf_counter() - start <= seconds:
                samples[i].append(samplers[i]())
        found = [Measurement.of(x) for x in samples]
        if time.perf_counter() - start > seconds:
            return found
        if min(len(samples[i]) for i in near) < _LEAST_SAMPLES:
            continue
        best = min(near, key=lambda i: found[i].median)
        if all(is_faster(found[best], found[i]) for i in near if i != best):
            return found


def is_faster(one: "Measurement", other: "Measurement") -> bool:
    """Whether the difference of two medians is more than their noise."""
    return one.median + one.uncertainty < other.median - other.uncertainty


@dataclasses.dataclass(frozen=True)
class _Sampler:
    """Gives seconds of one call, the mean of so many that the clock does not matter."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    repeats: int
    on_host: bool

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...]) -> "tuple[_Sampler, float]":
        """The sampler of a function, and the seconds of its first call."""
        start = time.perf_counter()
        out = jax.block_until_ready(fn(*args))
        first = time.perf_counter() - start
        on_host = device_of(jax.tree.leaves(out)).platform == "cpu"
        wanted = _SAMPLE_SECONDS if on_host else _SAMPLE_SECONDS_AWAY
        repeats = min(_MOST_REPEATS, math.ceil(wanted / max(first, 1e-9)))
        return cls(fn, args, repeats, on_host), first

    def __call__(self) -> float:
        # The host may run several calls at once; an accelerator has them queue up.
        start = time.perf_counter()
        for _ in range(self.repeats):
            out = self.fn(*self.args)
            if self.on_host:
                jax.block_until_ready(out)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / self.repeats


def outside_trace(fn: Callable[[], _Result], seconds: float | None = None) -> _Result:
    """Run `fn()` as if no trace were active, so that it can compile and time while one is.

    JAX keeps its traces per thread: `fn` runs in a new one, with the caller's context variables,
    default device, x64 mode and matmul precision. `fn` must not touch the caller's tracers.

    Args:
        fn: What to run.
        seconds: How long to wait for it; its thread is left alone then. None: for ever.

    Raises:
        TimeoutError: it takes longer.

    >>> def traced(x):
    ...     return x * outside_trace(lambda: float(jax.numpy.sum(jax.numpy.ones(3))))
    >>> jax.jit(traced)(2.0)
    Array(6., dtype=float32, weak_type=True)
    """
    config: Any = jax.config
    device = config.jax_default_device
    x64 = config.jax_enable_x64
    precision = config.jax_default_matmul_precision
    context = contextvars.copy_context()
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with (
                jax.default_device(device),
                jax.enable_x64(x64),
                jax.default_matmul_precision(precision),
            ):
                results.append(context.run(fn))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ejkernel-outside-trace", daemon=True)
    thread.start()
    thread.join(None if seconds is None else min(seconds, threading.TIMEOUT_MAX))
    if thread.is_alive():
        raise TimeoutError(f"it did not end within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
