"""Timing a function on the device, also from within a trace."""

import contextvars
import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from ejkernel.ops.platform import device_of

_Result = TypeVar("_Result")

# A sample shorter than this is mostly the clock; on an accelerator, which the host waits for,
# mostly the launch and the wait.
_SAMPLE_SECONDS = 2e-3
_SAMPLE_SECONDS_AWAY = 20e-3
_MOST_REPEATS = 200


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Seconds of one call: the best sample and the median one."""

    best: float
    median: float


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
    start = time.perf_counter()
    out = jax.block_until_ready(fn(*args))
    samples = [time.perf_counter() - start]
    on_host = device_of(jax.tree.leaves(out)).platform == "cpu"
    del out  # large results would take memory from those that follow
    wanted = _SAMPLE_SECONDS if on_host else _SAMPLE_SECONDS_AWAY
    repeats = min(_MOST_REPEATS, math.ceil(wanted / max(samples[0], 1e-9)))
    if repeats > 1:
        samples = []
    while len(samples) < iters:
        samples.append(_sample(fn, args, repeats, on_host))
    return Measurement(best=min(samples), median=statistics.median(samples))


def _sample(fn: Callable[..., Any], args: tuple[Any, ...], repeats: int, on_host: bool) -> float:
    """Seconds of a call. The host may run several at once; an accelerator has them queue up."""
    start = time.perf_counter()
    for _ in range(repeats):
        out = fn(*args)
        if on_host:
            jax.block_until_ready(out)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats


def outside_trace(fn: Callable[[], _Result]) -> _Result:
    """Run `fn()` as if no trace were active, so that it can compile and time while one is.

    JAX keeps its traces per thread: `fn` runs in a new one, with the caller's context variables,
    default device, x64 mode and matmul precision. `fn` must not touch the caller's tracers.

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
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
