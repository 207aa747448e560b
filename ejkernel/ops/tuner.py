"""Which candidate is fastest: each is run, checked against a trusted one, then timed."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from ejkernel import settings
from ejkernel.errors import TuningWarning
from ejkernel.ops import timing
from ejkernel.ops.implementation import CallInputs, Choice
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.platform import Device, Platform

_EPS = float(np.finfo(np.float32).eps)
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
    """

    def __init__(
        self,
        warmup: int = 1,
        iters: int = 3,
        device_lock: AbstractContextManager[object] | None = None,
        report: Callable[[Progress], None] | None = None,
    ) -> None:
        if warmup < 0 or iters < 1:
            raise ValueError(
                f"Tuner: warmup must be at least 0 and iters at least 1, got {warmup} and {iters}."
            )
        self.warmup: int = warmup
        self.iters: int = iters
        self.device_lock: AbstractContextManager[object] = device_lock or contextlib.nullcontext()
        self.report: Callable[[Progress], None] = report or _print_progress

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

    def autotune(self, inv: Invocation, choices: list[Choice]) -> Tuned | None:
        """The fastest of `choices` that runs and agrees; None when none does."""
        return timing.outside_trace(functools.partial(self._autotune, inv, choices))

    def _autotune(self, inv: Invocation, choices: list[Choice]) -> Tuned | None:
        arguments = _arguments(inv, self._computed)
        check = _ResultCheck(inv, choices, arguments, self._computed)
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
            said = "; ".join(f"{describe(choice)} ({reason})" for choice, reason in search.dropped)
            warnings.warn(
                f"{inv.op.identifier(inv.direction)}: dropped {len(search.dropped)} of "
                f"{len(choices)} candidates while tuning: {said}.",
                TuningWarning,
                stacklevel=2,
            )
        if not search.measured:
            return None
        best, seconds = min(search.measured, key=lambda pair: pair[1])
        return Tuned(best, seconds, search.measured, search.dropped)


class _Search:
    """Candidates that are compiled together, checked and timed one after the other."""

    def __init__(
        self, tuner: Tuner, inv: Invocation, arguments: tuple[Any, ...], check: "_ResultCheck"
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
        runs = [_runner(inv, choice) for choice in choices]
        with _compiled(runs, arguments, inv.device) as compiled_runs:
            for choice, compiled in zip(choices, compiled_runs, strict=True):
                try:
                    run, seconds = compiled(), None
                    with self._tuner.device_lock:
                        reason = self._check.objection(run(*arguments))
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


def _runner(inv: Invocation, choice: Choice) -> jax.stages.Wrapped:
    """The candidate's pass as a jitted function of the arguments."""

    def run(*arguments: PyTree) -> PyTree:
        if inv.direction == "backward" and inv.op.rarely_used_outputs:
            *others, d_outputs = arguments
            # Made in here: a compiler that sees zeros leaves out what they make superfluous.
            zeros = {
                name: jnp.zeros_like(getattr(d_outputs, name))
                for name in inv.op.rarely_used_outputs
            }
            arguments = (*others, d_outputs._replace(**zeros))
        return choice.run(*arguments, inv.spec, choice.params, device=inv.device)

    return jax.jit(run)


@contextlib.contextmanager
def _compiled(
    runs: list[jax.stages.Wrapped], arguments: tuple[Any, ...], device: Device
) -> Iterator[list[Callable[[], Callable[..., Any]]]]:
    """For each run a function that gives it compiled, or raises why it cannot be.

    For an accelerator the host compiles several at once; all of them are traced here, because
    JAX keeps its settings per thread.
    """
    if device.platform == "cpu":
        yield [lambda run=run: run for run in runs]
        return
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1)

    def begin(run: jax.stages.Wrapped) -> Callable[[], Callable[..., Any]]:
        try:
            return pool.submit(run.lower(*arguments).compile).result
        except Exception as error:
            return functools.partial(_raise, error)

    try:
        yield [begin(run) for run in runs]
    finally:  # after Ctrl-C, what has not begun is not compiled
        pool.shutdown(wait=False, cancel_futures=True)


def _raise(error: Exception) -> Any:
    raise error


def _arguments(inv: Invocation, computed: Callable[..., Any]) -> tuple[Any, ...]:
    """Random data of the call's shapes; for a backward also residuals and cotangents."""
    inputs = _sample(inv)
    if inv.direction == "forward":
        return (inputs,)
    forward = dataclasses.replace(inv, direction="forward")
    if (trusted := _by_xla(forward)) is None:
        raise LookupError(f"{inv.op.name}: XLA has no forward pass to tune a backward pass with.")
    outputs, residuals = computed(_runner(forward, trusted), inputs)
    leaves, treedef = jax.tree.flatten(outputs)
    seeds = jax.random.split(jax.random.key(1), len(leaves))
    cotangents = [
        jax.random.normal(s, x.shape, x.dtype) for s, x in zip(seeds, leaves, strict=True)
    ]
    return inputs, residuals, jax.tree.unflatten(treedef, cotangents)


def _sample(inv: Invocation) -> CallInputs:
    """Random floats; integers as they came, or what the op says where they are not known yet."""
    leaves, treedef = jax.tree.flatten(inv.inputs)
    seeds = jax.random.split(jax.random.key(0), max(len(leaves), 1))

    def draw(seed: jax.Array, x: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jax.random.normal(seed, x.shape, x.dtype)
        if isinstance(x, Tracer | jax.ShapeDtypeStruct):
            return (
                jnp.ones(x.shape, x.dtype) if x.dtype == jnp.bool_ else jnp.zeros(x.shape, x.dtype)
            )
        return x

    drawn = jax.tree.unflatten(treedef, list(map(draw, seeds, leaves)))
    return (
        drawn if inv.op.tuning_inputs is None else inv.op.tuning_inputs(inv.inputs, drawn, inv.spec)
    )


class _ResultCheck:
    """Compares a candidate with XLA at full precision; a user's own kernel with its heuristic."""

    def __init__(
        self,
        inv: Invocation,
        choices: list[Choice],
        arguments: tuple[Any, ...],
        computed: Callable[..., Any],
    ) -> None:
        self.floor = _EPS * (32 if inv.direction == "forward" else 128)
        trusted = _by_xla(inv) or choices[0]
        try:
            plain = exact = _arrays(computed(_runner(inv, trusted), *arguments))
            if not inv.op.differentiable_by_jax:
                with jax.default_matmul_precision("highest"):
                    exact = _arrays(computed(_runner(inv, trusted), *_widened(arguments)))
            self._learn(plain, exact)
        except Exception:  # then there is nothing to compare with: the first that runs is trusted
            self.exact = None

    def _learn(self, plain: list[jax.Array], exact: list[jax.Array]) -> None:
        """What is right, and how far from it a result may be."""
        self.exact = exact
        self.allowed: list[float] = []
        for one, other in zip(plain, exact, strict=True):
            eps = max(self.floor, 64 * _resolution(one)) if one is other else self.floor
            largest = _largest(other)
            # XLA may round a result alone; what computes in the same type also rounds what it is
            # made of: a place of the largest number, in addition to the half of the result itself.
            last_place = _resolution(one) * 2.0 ** np.floor(np.log2(largest)) if largest else 0.0
            rounding = max(2 * _distance(one, other), 1.5 * last_place)
            self.allowed.append(rounding + eps * largest)

    def objection(self, result: PyTree) -> str | None:
        """Why the result cannot be right, or None."""
        actual = _arrays(result)
        if self.exact is None:
            self._learn(actual, actual)
        for got, exact, allowed in zip(actual, self.exact or (), self.allowed, strict=True):
            if got.shape != exact.shape:
                return f"gives shape {got.shape} where {exact.shape} is expected"
            if not (distance := _distance(got, exact)) <= allowed:
                return f"is off by {distance:.2e} where {allowed:.2e} is allowed"
        return None


def _by_xla(inv: Invocation) -> Choice | None:
    """XLA's choice for the call, whatever its platform; None for an op that XLA does not have."""
    inputs = inv.inputs
    supported, _ = inv.op.supporting(
        inv.direction, inputs, inv.spec, inv.device, Platform.XLA.value
    )
    if not supported:
        return None
    source, run = supported[0]
    return Choice(source, run, run.heuristic(inputs, inv.spec, inv.device))


def _arrays(tree: PyTree) -> list[jax.Array]:
    return [jnp.asarray(x) for x in jax.tree.leaves(tree)]


def _widened(tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: (
            x.astype(jnp.float32)
            if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
            else x
        ),
        tree,
    )


def _resolution(x: jax.Array) -> float:
    return float(jnp.finfo(x.dtype).eps) if jnp.issubdtype(x.dtype, jnp.floating) else 0.0


@jax.jit
def _gap(a: jax.Array, b: jax.Array) -> jax.Array:
    """Largest difference; equal infinities do not differ, a NaN differs from everything."""
    a, b = _wide(a), _wide(b)
    return jnp.where(a == b, 0.0, jnp.abs(a - b)).max(initial=0.0)


@jax.jit
def _size(x: jax.Array) -> jax.Array:
    """The largest finite number."""
    x = jnp.abs(_wide(x))
    return jnp.where(jnp.isfinite(x), x, 0.0).max(initial=0.0)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _distance(a: jax.Array, b: jax.Array) -> float:
    # On the device: to fetch long arrays and compare them here would take longer than to tune.
    return float(_gap(a, b))


def _largest(x: jax.Array) -> float:
    return float(_size(x))


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
    wanted = settings.autotune_progress()
    if wanted or (wanted is None and sys.stderr.isatty()):
        print(progress, file=sys.stderr)
