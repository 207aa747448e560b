"""Which candidate is fastest: each is run, checked against a trusted one, then timed."""

import contextlib
import dataclasses
import functools
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from ejkernel import settings
from ejkernel.errors import TuningWarning
from ejkernel.ops import timing
from ejkernel.ops.implementation import Choice
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.measuring import (
    ResultCheck,
    by_xla,
    compiled_together,
    difference,
    random_arguments,
    runner,
)
from ejkernel.ops.platform import Platform

_COMPARING_SECONDS = 0.4  # of timing, for a few candidates
_HOPELESS = 3.0  # times the best so far
_NEAR = 1.25  # a platform whose guess is slower than that by no more is worth looking at closely


class Tuned(NamedTuple):
    """The outcome of measuring one call."""

    best: Choice
    seconds: float
    measurements: list[tuple[Choice, float]]
    dropped: list[tuple[Choice, str]]


class Progress(NamedTuple):
    """What is known after each candidate of a call; plain values, so that processes can send it."""

    call: str  # the op, its direction and version
    number: int  # of the candidate, from 1
    total: int
    candidate: str
    outcome: str  # its time, or why it was dropped
    best: float | None  # seconds of the fastest so far
    seconds_left: float

    def __str__(self) -> str:
        best = "none" if self.best is None else _milliseconds(self.best)
        return (
            f"tuning {self.call} [{self.number}/{self.total}] {self.candidate}: {self.outcome} "
            f"(best {best}, about {self.seconds_left:.0f} s left)"
        )


class Tuner:
    """Times candidates on random data, outside of any trace that is under way.

    Args:
        warmup: untimed runs of each candidate.
        iters: timed runs of each candidate; the fastest counts.
        device_lock: held while the device computes, not while the host compiles; processes that
            tune on one device at the same time share it.
        report: called after each candidate; None prints a line to stderr, as
            `EJKERNEL_AUTOTUNE_PROGRESS` says.
        timeout: seconds after which a candidate that is still being compiled, or still runs, is
            dropped.
    """

    def __init__(
        self,
        warmup: int = 1,
        iters: int = 3,
        device_lock: AbstractContextManager[object] | None = None,
        report: Callable[[Progress], None] | None = None,
        timeout: float = 300.0,
    ) -> None:
        if warmup < 0 or iters < 1:
            raise ValueError(
                f"Tuner: warmup must be at least 0 and iters at least 1, got {warmup} and {iters}."
            )
        if not timeout > 0:
            raise ValueError(f"Tuner: timeout must be positive, got {timeout}.")
        self.warmup: int = warmup
        self.iters: int = iters
        self.device_lock: AbstractContextManager[object] = device_lock or contextlib.nullcontext()
        self.report: Callable[[Progress], None] = report or _print_progress
        self.timeout: float = timeout

    def measure(self, function: Callable[..., Any], *args: object) -> float:
        """Seconds of the fastest of `iters` runs of `function(*args)`."""
        return timing.measure(function, *args, warmup=self.warmup, iters=self.iters).best

    def time_candidate(
        self, run: Callable[..., Any], arguments: tuple[Any, ...], best: float
    ) -> float:
        """As `measure`; a candidate far slower than the best so far gets one sample only."""
        once = timing.measure(run, *arguments, warmup=0, iters=1).best
        return once if once > _HOPELESS * best else self.measure(run, *arguments)

    def _computed(self, run: jax.stages.Wrapped, *arguments: object) -> Any:
        """The results of a jitted function, computed while the device is held."""
        compiled = run.lower(*arguments).compile()
        with self.device_lock:
            return jax.block_until_ready(compiled(*arguments))

    def within_time(self, function: Callable[..., Any], *args: object) -> Any:
        """The result of `function(*args)` on the device; a `TimeoutError` if it takes too long."""
        return timing.outside_trace(
            lambda: jax.block_until_ready(function(*args)), seconds=self.timeout
        )

    def autotune(self, inv: Invocation, choices: list[Choice]) -> Tuned | None:
        """The fastest of `choices` that runs and agrees; None when none does."""
        return timing.outside_trace(functools.partial(self._autotune, inv, choices))

    def _autotune(self, inv: Invocation, choices: list[Choice]) -> Tuned | None:
        arguments = random_arguments(inv, self._computed, by_xla)
        check = ResultCheck(inv, choices, arguments, self._computed)
        search = _Search(self, inv, arguments, check)
        groups: dict[int, list[Choice]] = {}
        for choice in choices:
            groups.setdefault(id(choice.source), []).append(choice)
        # What runs anywhere is mostly slow on an accelerator: last, it need not be timed for long.
        ordered = sorted(groups.values(), key=lambda x: x[0].source.platform is Platform.XLA)
        search.total = len(choices)
        search.run([first for first, *_ in ordered])
        others = [x for first, *others in ordered if search.is_near(first) for x in others]
        search.total = len(ordered) + len(others)
        search.run(others)
        if search.dropped:
            _warn_of_dropped(inv, len(choices), search.dropped)
        if not search.measured:
            return None
        best, seconds = min(search.measured, key=lambda pair: pair[1])
        return Tuned(best, seconds, search.measured, search.dropped)

    def compare(self, inv: Invocation, choices: list[Choice]) -> Tuned | None:
        """The fastest of a few choices, timed interleaved until it is clear which that is.

        All are compiled side by side. The first is trusted: results are compared with its, and it
        wins unless another one is faster by more than the noise.
        """
        if settings.shows_autotuning():
            print(
                f"ejkernel: comparing {len(choices)} configurations of "
                f"{inv.op.identifier(inv.direction).partition('@')[0]} for this call, once; "
                "EJKERNEL_AUTOTUNE_POLICY=heuristics forbids it, ejkernel.autotune compares all.",
                file=sys.stderr,
            )
        return timing.outside_trace(functools.partial(self._compare, inv, choices))

    def _compare(self, inv: Invocation, choices: list[Choice]) -> Tuned | None:
        arguments = random_arguments(inv, self._computed, _preferred)
        runs = [runner(inv, choice) for choice in choices]
        right: list[tuple[Choice, Callable[..., Any]]] = []
        dropped: list[tuple[Choice, str]] = []
        expected: Any = None
        with compiled_together(runs, arguments, inv.device) as compiled_runs:
            for choice, compiled in zip(choices, compiled_runs, strict=True):
                try:
                    run = self.within_time(compiled)
                    with self.device_lock:
                        result = self.within_time(run, *arguments)
                        reason = None if expected is None else difference(result, expected)
                    expected = result if expected is None else expected
                except Exception as error:  # a candidate that fails is dropped
                    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                if reason is None:
                    right.append((choice, run))
                else:
                    dropped.append((choice, reason))
        if dropped:
            _warn_of_dropped(inv, len(choices), dropped)
        if not right:
            return None
        with self.device_lock:
            seconds = timing.interleaved([run for _, run in right], arguments, _COMPARING_SECONDS)
        measured = [(choice, one.median) for (choice, _), one in zip(right, seconds, strict=True)]
        best = min(range(len(right)), key=lambda i: seconds[i].median)
        if not timing.is_faster(seconds[best], seconds[0]):
            best = 0
        return Tuned(*measured[best], measured, dropped)


def _preferred(inv: Invocation) -> Choice | None:
    """The choice of the heuristics."""
    supported, _ = inv.op.supporting(inv.direction, inv.inputs, inv.spec, inv.device, None)
    if not supported:
        return None
    source, run = supported[0]
    return Choice(source, run, run.heuristic(inv.inputs, inv.spec, inv.device))


def _warn_of_dropped(inv: Invocation, count: int, dropped: list[tuple[Choice, str]]) -> None:
    said = "; ".join(f"{describe(choice)} ({reason})" for choice, reason in dropped)
    warnings.warn(
        f"{inv.op.identifier(inv.direction)}: dropped {len(dropped)} of {count} candidates while "
        f"tuning: {said}.",
        TuningWarning,
        stacklevel=3,
    )


class _Search:
    """Candidates that are compiled together, checked and timed one after the other."""

    def __init__(
        self, tuner: Tuner, inv: Invocation, arguments: tuple[Any, ...], check: ResultCheck
    ) -> None:
        self._tuner, self._inv, self._arguments, self._check = tuner, inv, arguments, check
        self._start = time.monotonic()
        self.total = 0
        self.measured: list[tuple[Choice, float]] = []
        self.dropped: list[tuple[Choice, str]] = []

    @property
    def _best(self) -> float:
        return min((seconds for _, seconds in self.measured), default=float("inf"))

    def is_near(self, first: Choice) -> bool:
        """Whether the others of its platform may still win; as well if the first did not run."""
        seconds = [seconds for choice, seconds in self.measured if choice is first]
        return not seconds or seconds[0] <= _NEAR * self._best

    def run(self, choices: list[Choice]) -> None:
        inv, arguments = self._inv, self._arguments
        runs = [runner(inv, choice) for choice in choices]
        with compiled_together(runs, arguments, inv.device) as compiled_runs:
            for choice, compiled in zip(choices, compiled_runs, strict=True):
                try:
                    run, seconds = self._tuner.within_time(compiled), None
                    with self._tuner.device_lock:
                        result = self._tuner.within_time(run, *arguments)
                        reason = self._check.objection(result)
                        if reason is None:
                            seconds = self._tuner.time_candidate(run, arguments, self._best)
                except Exception as error:  # a candidate that fails is dropped
                    reason, seconds = f"{type(error).__name__}: {error}".partition("\n")[0], None
                if seconds is None:
                    self.dropped.append((choice, reason or ""))
                else:
                    self.measured.append((choice, seconds))
                outcome = f"dropped: {reason}" if seconds is None else _milliseconds(seconds)
                self._tuner.report(self._progress(choice, outcome))

    def _progress(self, choice: Choice, outcome: str) -> Progress:
        """The state of the search after a candidate."""
        number = len(self.measured) + len(self.dropped)
        each = (time.monotonic() - self._start) / number
        return Progress(
            call=self._inv.op.identifier(self._inv.direction),
            number=number,
            total=self.total,
            candidate=describe(choice),
            outcome=outcome,
            best=self._best if self.measured else None,
            seconds_left=each * (self.total - number),
        )


def describe(choice: Choice) -> str:
    """The platform of a candidate and those of its parameters that are set."""
    params = choice.params
    if not dataclasses.is_dataclass(params):
        return choice.source.platform.value + ("" if params is None else f" {params}")
    names = (field.name for field in dataclasses.fields(params))
    values = {name: getattr(params, name) for name in names if name not in ("platform", "backend")}
    given = (f"{name}={value}" for name, value in values.items() if value is not None)
    return " ".join([choice.source.platform.value, *given])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _print_progress(progress: Progress) -> None:
    if settings.shows_autotuning():
        print(progress, file=sys.stderr)
