"""Many random calls, in this process or in several; failures are minimised."""

import dataclasses
import functools
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from ejkernel.cli.outcome import Outcome
from ejkernel.cli.random_calls.choices import Choices, drawn, fields_of
from ejkernel.cli.random_calls.judge import AUTO, Comparison
from ejkernel.cli.random_calls.linear import Gated, Lightning
from ejkernel.cli.random_calls.others import Grouped, NativeSparse, Pooling
from ejkernel.cli.random_calls.paged import Decode, RaggedCombined, RaggedSeparate, RaggedUpdate
from ejkernel.cli.random_calls.softmax import Blocksparse, Flash, Ring
from ejkernel.kernels import OPS

KINDS: dict[str, type[Choices]] = {
    "blocksparse_attention": Blocksparse,
    "flash_attention": Flash,
    "gla_attention": Gated,
    "grouped_matmul": Grouped,
    "lightning_attention": Lightning,
    "mean_pooling": Pooling,
    "native_sparse_attention": NativeSparse,
    "page_attention": Decode,
    "ragged_page_attention_v2": RaggedCombined,
    "ragged_page_attention_v3": RaggedSeparate,
    "ragged_page_attention_v3_update": RaggedUpdate,
    "recurrent_attention": Gated,
    "ring_attention": Ring,
    "scaled_dot_product_attention": Flash,
}
_CALLS_PER_PROCESS = 16  # a kernel that breaks the device breaks it for the rest of its process
_CALLS_KEPT = 20  # programs of so many calls are kept in memory
_MOST_TRIES = 100  # to simplify a call

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Options:
    """Which calls are compared, and how; another process gets them by pickling."""

    seed: int
    platform: str | None = None  # None: every one that supports the call
    gradients: bool = True


class CallResult(NamedTuple):
    """A call on one platform."""

    index: int
    operation: str
    platform: str
    label: str  # the implementation in words
    outcome: Outcome


def choices_of(seed: int, index: int) -> Choices:
    """Call `index` of a seed: the same on every machine; the operations follow each other."""
    operation = OPS[index % len(OPS)]
    return drawn(KINDS[operation], operation, np.random.default_rng([seed, index]))


def indices(first: int, count: int, operations: Sequence[str]) -> list[int]:
    """The indices of the next `count` calls of these operations."""
    chosen = (i for i in itertools.count(first) if OPS[i % len(OPS)] in operations)
    return list(itertools.islice(chosen, count))


def judged(options: Options, choices: Choices, index: int = 0) -> list[CallResult]:
    """The call on every platform that has an implementation for this device."""
    call = comparison(choices, options.gradients)
    if call.refused is not None:
        return [CallResult(index, choices.operation, AUTO, AUTO, call.refused)]
    names = [x for x in call.platforms() if options.platform in (None, x)]
    return [CallResult(index, choices.operation, x, call.label(x), call.compare(x)) for x in names]


def comparison(choices: Choices, gradients: bool = True) -> Comparison:
    """The call that these choices make, and its reference."""
    return Comparison(
        choices.operation,
        choices.dtype,
        choices.values,
        choices.small_blocks,
        gradients and choices.differentiable,
    )


def minimised(options: Options, failure: CallResult) -> str:
    """The program of the simplest call found that fails as this one does."""
    choices = choices_of(options.seed, failure.index)
    simplest = simplified(choices, functools.partial(_fails_alike, options, failure))
    return simplest.program(failure.platform)


def simplified(choices: Choices, fails: Callable[[Choices], bool]) -> Choices:
    """The simplest call that still fails: choice after choice, until none can be simplified."""
    tries = itertools.count()

    def still_fails(simpler: Choices) -> bool:
        if simpler.program(AUTO) == choices.program(AUTO):  # a choice without effect
            return True
        return next(tries) < _MOST_TRIES and fails(simpler)

    before = None
    while choices != before:
        before = choices
        for field in fields_of(choices):
            while found := next(filter(still_fails, choices.simpler(field)), None):
                choices = found
    return choices


def _fails_alike(options: Options, failure: CallResult, choices: Choices) -> bool:
    outcome = comparison(choices, options.gradients).compare(failure.platform)
    kind = lambda x: x.detail.partition(" ")[0]  # value, gradient, or the class of an exception
    return outcome.verdict == "wrong" and kind(outcome) == kind(failure.outcome)


def every(options: Options, wanted: list[int], workers: int) -> Iterator[list[CallResult]]:
    """Each call on its platforms, as they come, from this process or from several."""
    if workers == 1:
        for done, index in enumerate(wanted, 1):
            yield judged(options, choices_of(options.seed, index), index)
            if done % _CALLS_KEPT == 0:
                jax.clear_caches()
        return
    chunks = [wanted[i : i + _CALLS_PER_PROCESS] for i in range(0, len(wanted), _CALLS_PER_PROCESS)]
    for chunk in in_threads(functools.partial(_in_a_process, options), chunks, workers):
        yield from chunk


def _in_a_process(options: Options, chunk: list[int]) -> list[list[CallResult]]:
    """The calls in a new process; if it dies, each call in one of its own."""
    try:
        return run_in_process(_chunk, options, chunk)
    except BrokenProcessPool:
        if len(chunk) > 1:
            return [x for index in chunk for x in _in_a_process(options, [index])]
        died = Outcome("wrong", "ProcessDied: the process of the call ended")
        operation = OPS[chunk[0] % len(OPS)]
        platform = options.platform or AUTO
        return [[CallResult(chunk[0], operation, platform, platform, died)]]


def _chunk(options: Options, chunk: list[int]) -> list[list[CallResult]]:
    return list(every(options, chunk, 1))


def run_in_process(function: Callable[..., Result], *arguments: object) -> Result:
    """The result of a function in a new process, which shares the device with others."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def in_threads(
    function: Callable[[list[int]], Result], chunks: list[list[int]], workers: int
) -> Iterator[Result]:
    """The results of all chunks as they come; when it is stopped, the processes end with it."""
    stopped = threading.Event()

    def one(chunk: list[int]) -> Result | None:
        if hasattr(signal, "pthread_sigmask"):  # leave Ctrl-C to the main thread; not on Windows
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        return None if stopped.is_set() else function(chunk)

    pool = ThreadPoolExecutor(workers)
    try:
        for done in as_completed([pool.submit(one, chunk) for chunk in chunks]):
            if (result := done.result()) is not None:
                yield result
    except BaseException:
        stopped.set()
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
