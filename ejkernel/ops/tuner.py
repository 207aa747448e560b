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
    DeviceBlockedError,
    ResultCheck,
    WrongResultError,
    by_xla,
    compiled_together,
    is_deterministic,
    random_arguments,
    runner,
    same_bits,
    trusted_runs,
)
from ejkernel.ops.platform import Platform, default_device

_COMPARING_SECONDS = 0.4  # of timing, for a few candidates
# Plain XLA takes up to some hundred times as long as a kernel: a first call does not wait for it
# where the heuristic's configuration takes this many seconds.
_LONG_RUN = 5e-3
_HOPELESS = 3.0  # times the best so far
_NEAR = 1.25  # a platform whose guess is slower than that by no more is worth looking at closely
_Compiled = Callable[[], Callable[..., Any]]  # gives a compiled function, or raises


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
        timeout: seconds for each step of a candidate: to compile it, to run it, to time it. One
            that takes longer is dropped. An accelerator may still be busy with it if it was
            running: then nothing else is measured.
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
        compiled = self.within_time(lambda: run.lower(*arguments).compile())
        with self.device_lock:
            return self._on_device(compiled, *arguments)

    def within_time(self, function: Callable[..., Any], *args: object) -> Any:
        """The result of `function(*args)` on the device; a `TimeoutError` if it takes too long."""
        return timing.outside_trace(
            lambda: jax.block_until_ready(function(*args)), seconds=self.timeout
        )

    def _on_device(self, function: Callable[..., Any], *args: Any) -> Any:
        """`within_time` for what runs on the device."""
        try:
            return self.within_time(function, *args)
        except TimeoutError as error:
            if default_device().platform == "cpu":
                raise
            raise DeviceBlockedError(str(error)) from None

    def _result_check(
        self, inv: Invocation, trusted: list[_Compiled], arguments: tuple[Any, ...]
    ) -> ResultCheck:
        """The check against trusted results, or against the first result if there are none."""
        try:
            runs = [self.within_time(compiled) for compiled in trusted]
            with self.device_lock:
                return ResultCheck(inv, [self._on_device(run, *arguments) for run in runs])
        except DeviceBlockedError:
            raise
        except Exception:
            return ResultCheck(inv, [])

    def checked(
        self,
        inv: Invocation,
        choice: Choice,
        compiled: _Compiled,
        arguments: tuple[Any, ...],
        check: ResultCheck,
    ) -> Callable[..., Any]:
        """The compiled candidate; an error if it does not run or its results are wrong."""
        run = self.within_time(compiled)
        with self.device_lock:
            result = self._on_device(run, *arguments)
            if (mismatch := check.mismatch(result)) is not None:
                raise WrongResultError(mismatch)
            if is_deterministic(inv, choice) and not same_bits(
                result, self._on_device(run, *arguments)
            ):
                raise WrongResultError("gives other bits in a second run")
        return run

    def timed(self, run: Callable[..., Any], arguments: tuple[Any, ...], best: float) -> float:
        """`time_candidate` while the device is held, within the time limit."""
        with self.device_lock:
            return self._on_device(self.time_candidate, run, arguments, best)

    def autotune(self, inv: Invocation, choices: list[Choice]) -> Tuned | None:
        """The fastest of `choices` that runs and agrees; None when none does."""
        return timing.outside_trace(functools.partial(self._autotune, inv, choices))

    def _autotune(self, inv: Invocation, choices: list[Choice]) -> Tuned | None:
        arguments = random_arguments(inv, self._computed, by_xla)
        with compiled_together(trusted_runs(inv, choices), arguments, inv.device) as trusted:
            check = self._result_check(inv, trusted, arguments)
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
            _warn_of_dropped(inv, len(choices), search.dropped, search.blocked)
        if not search.measured:
            return None
        best, seconds = min(search.measured, key=lambda pair: pair[1])
        return Tuned(best, seconds, search.measured, search.dropped)

    def compare(self, inv: Invocation, choices: list[Choice]) -> Tuned | None:
        """The fastest of a few choices, timed interleaved until it is clear which that is.

        All are compiled side by side and checked against XLA. The first wins unless another one is
        faster by more than the noise.
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
        trusted = trusted_runs(inv, choices)
        runs = [*trusted, *(runner(inv, choice) for choice in choices)]
        right: list[tuple[Choice, Callable[..., Any]]] = []
        dropped: list[tuple[Choice, str]] = []
        blocked = False
        with compiled_together(runs, arguments, inv.device) as compiled_runs:
            reference, candidates = compiled_runs[: len(trusted)], compiled_runs[len(trusted) :]
            if self._takes_long(candidates[0], arguments):
                reference = []
            check = self._result_check(inv, reference, arguments)
            for choice, compiled in zip(choices, candidates, strict=True):
                try:
                    right.append((choice, self.checked(inv, choice, compiled, arguments, check)))
                except Exception as error:  # a candidate that fails is dropped
                    dropped.append((choice, _reason(error)))
                    if blocked := isinstance(error, DeviceBlockedError):
                        break
        if dropped:
            _warn_of_dropped(inv, len(choices), dropped, blocked)
        if blocked or not right:
            return None
        with self.device_lock:
            candidates = [run for _, run in right]
            seconds = self._on_device(timing.interleaved, candidates, arguments, _COMPARING_SECONDS)
        measured = [(choice, one.median) for (choice, _), one in zip(right, seconds, strict=True)]
        best = min(range(len(right)), key=lambda i: seconds[i].median)
        if not timing.is_faster(seconds[best], seconds[0]):
            best = 0
        return Tuned(*measured[best], measured, dropped)

    def _takes_long(self, compiled: _Compiled, arguments: tuple[Any, ...]) -> bool:
        """Whether one run takes so long that XLA's would delay a first call."""
        try:
            run = self.within_time(compiled)
            with self.device_lock:
                measure = functools.partial(timing.measure, iters=1)
                return self._on_device(measure, run, *arguments).best > _LONG_RUN
        except DeviceBlockedError:
            raise
        except Exception:
            return False


def _preferred(inv: Invocation) -> Choice | None:
    """The choice of the heuristics."""
    supported, _ = inv.op.supporting(inv.direction, inv.inputs, inv.spec, inv.device, None)
    if not supported:
        return None
    source, run = supported[0]
    return Choice(source, run, run.heuristic(inv.inputs, inv.spec, inv.device))


def _reason(error: Exception) -> str:
    """Why a candidate is dropped."""
    if isinstance(error, WrongResultError):
        return str(error)
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _warn_of_dropped(
    inv: Invocation, count: int, dropped: list[tuple[Choice, str]], blocked: bool
) -> None:
    said = "; ".join(f"{describe(choice)} ({reason})" for choice, reason in dropped)
    end = " Nothing else is measured: the device may still be busy." if blocked else ""
    warnings.warn(
        f"{inv.op.identifier(inv.direction)}: dropped {len(dropped)} of {count} candidates while "
        f"tuning: {said}.{end}",
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
        self.blocked = False

    @property
    def _best(self) -> float:
        return min((seconds for _, seconds in self.measured), default=float("inf"))

    def is_near(self, first: Choice) -> bool:
        """Whether the others of its platform may still win; as well if the first did not run."""
        seconds = [seconds for choice, seconds in self.measured if choice is first]
        return not seconds or seconds[0] <= _NEAR * self._best

    def run(self, choices: list[Choice]) -> None:
        if self.blocked:
            return
        inv, arguments, tuner = self._inv, self._arguments, self._tuner
        runs = [runner(inv, choice) for choice in choices]
        with compiled_together(runs, arguments, inv.device) as compiled_runs:
            for choice, compiled in zip(choices, compiled_runs, strict=True):
                try:
                    run = tuner.checked(inv, choice, compiled, arguments, self._check)
                    seconds = tuner.timed(run, arguments, self._best)
                except Exception as error:  # a candidate that fails is dropped
                    self.dropped.append((choice, _reason(error)))
                    self.blocked = isinstance(error, DeviceBlockedError)
                    outcome = f"dropped: {_reason(error)}"
                else:
                    self.measured.append((choice, seconds))
                    outcome = _milliseconds(seconds)
                tuner.report(self._progress(choice, outcome))
                if self.blocked:
                    return

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
