"""What measuring a call takes: random data, its candidates compiled, a check of their results."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from ejkernel.ops.implementation import CallInputs, Choice
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.platform import Device, Platform

_EPS = float(np.finfo(np.float32).eps)
_Future = concurrent.futures.Future[Callable[..., Any]]


def runner(inv: Invocation, choice: Choice) -> jax.stages.Wrapped:
    """The candidate's pass as a jitted function of the arguments."""

    def run(*arguments: PyTree) -> PyTree:
        if inv.direction == "backward" and inv.op.rarely_used_outputs:
            *others, d_outputs = arguments
            # Created inside of the traced function on purpose: XLA sees constant zeros, as in a
            # training step that does not use these outputs, and removes what only they need.
            zeros = {
                name: jnp.zeros_like(getattr(d_outputs, name))
                for name in inv.op.rarely_used_outputs
            }
            arguments = (*others, d_outputs._replace(**zeros))
        return choice.run(*arguments, inv.spec, choice.params, device=inv.device)

    return jax.jit(run)


@contextlib.contextmanager
def compiled_together(
    runs: list[jax.stages.Wrapped], arguments: tuple[Any, ...], device: Device
) -> Iterator[list[Callable[[], Callable[..., Any]]]]:
    """For each run a function that gives it compiled, or raises why it cannot be.

    For an accelerator the host compiles several at once, in daemon threads, for which Python does
    not wait at exit; all of them are traced here, because JAX keeps its settings per thread.
    """
    if device.platform == "cpu":
        yield [lambda run=run: run for run in runs]
        return
    waiting: queue.SimpleQueue[tuple[_Future, Callable[[], Any]] | None] = queue.SimpleQueue()
    threads = min(os.cpu_count() or 1, len(runs))
    for _ in range(threads):
        name = "ejkernel-compile"
        threading.Thread(target=_work, args=(waiting,), name=name, daemon=True).start()
    futures: list[_Future] = []

    def begin(run: jax.stages.Wrapped) -> Callable[[], Callable[..., Any]]:
        try:
            compile_ = run.lower(*arguments).compile
        except Exception as error:
            return functools.partial(_raise, error)
        futures.append(future := concurrent.futures.Future())
        waiting.put((future, compile_))
        return future.result

    try:
        yield [begin(run) for run in runs]
    finally:  # after Ctrl-C, what has not begun is not compiled
        for future in futures:
            future.cancel()
        for _ in range(threads):
            waiting.put(None)


def _work(waiting: "queue.SimpleQueue[tuple[_Future, Callable[[], Any]] | None]") -> None:
    """Compute what is waiting, until there is None."""
    while (task := waiting.get()) is not None:
        future, compute = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(compute())
        except BaseException as error:
            future.set_exception(error)


def _raise(error: Exception) -> Any:
    raise error


def random_arguments(
    inv: Invocation,
    computed: Callable[..., Any],
    forward_choice: Callable[[Invocation], Choice | None],
) -> tuple[Any, ...]:
    """Random data of the call's shapes; for a backward also residuals and cotangents.

    Args:
        inv: the call.
        computed: `computed(run, *arguments)` gives the results of a jitted function.
        forward_choice: with what the residuals of a backward pass are computed.
    """
    inputs = _sample(inv)
    if inv.direction == "forward":
        return (inputs,)
    forward = dataclasses.replace(inv, direction="forward")
    if (choice := forward_choice(forward)) is None:
        raise LookupError(f"{inv.op.name}: there is no forward pass to tune a backward pass with.")
    outputs, residuals = computed(runner(forward, choice), inputs)
    leaves, treedef = jax.tree.flatten(outputs)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    return inputs, residuals, jax.tree.unflatten(treedef, _normal(1, tuple(shapes)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _normal(seed: int, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> list[jax.Array]:
    """Normally distributed arrays, by one program."""
    seeds = jax.random.split(jax.random.key(seed), max(len(shapes), 1))
    return [jax.random.normal(s, x.shape, x.dtype) for s, x in zip(seeds, shapes, strict=False)]


def _sample(inv: Invocation) -> CallInputs:
    """Random floats; integers as they came, or what the op says where they are not known yet."""
    leaves, treedef = jax.tree.flatten(inv.inputs)
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    floats = [x for x, yes in zip(leaves, is_float, strict=True) if yes]
    numbers = iter(_normal(0, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in floats)))

    def draw(x: jax.Array | np.ndarray | jax.ShapeDtypeStruct, yes: bool) -> Any:
        if yes:
            return next(numbers)
        if isinstance(x, Tracer | jax.ShapeDtypeStruct):
            fill = np.ones if x.dtype == jnp.bool_ else np.zeros
            return jnp.asarray(fill(x.shape, x.dtype))
        return x

    drawn = jax.tree.unflatten(treedef, list(map(draw, leaves, is_float)))
    return (
        drawn if inv.op.tuning_inputs is None else inv.op.tuning_inputs(inv.inputs, drawn, inv.spec)
    )


class DeviceBlockedError(TimeoutError):
    """A run on an accelerator did not end in time; what follows would wait behind it."""


class WrongResultError(Exception):
    """Why a result cannot be right."""


def trusted_runs(inv: Invocation, choices: list[Choice]) -> list[jax.stages.Wrapped]:
    """XLA's pass, and the same at full precision; for a user's own kernel that of its heuristic."""
    plain = runner(inv, by_xla(inv) or choices[0])
    if inv.op.differentiable_by_jax:
        return [plain]

    def exact(*arguments: PyTree) -> PyTree:
        with jax.default_matmul_precision("highest"):
            return plain(*_widened(arguments))

    return [plain, jax.jit(exact)]


class ResultCheck:
    """Compares results of candidates with trusted ones.

    Args:
        inv: the call.
        trusted: the results of `trusted_runs`; without any, the first result is trusted.
    """

    exact: list[jax.Array] | None

    def __init__(self, inv: Invocation, trusted: list[PyTree]) -> None:
        self.floor = _EPS * (32 if inv.direction == "forward" else 128)
        self.exact = None
        if trusted:
            plain, *others = map(_arrays, trusted)
            self._learn(plain, others[0] if others else plain)

    def _learn(self, plain: list[jax.Array], exact: list[jax.Array]) -> None:
        """What is right, and how far from it a result may be."""
        self.exact = exact
        self.allowed: list[float] = []
        for one, other in zip(plain, exact, strict=True):
            eps = max(self.floor, 64 * _resolution(one)) if one is other else self.floor
            largest = _largest(other)
            # Allow one ulp of the largest value for rounded intermediates, plus half an ulp for the
            # result.
            last_place = _resolution(one) * 2.0 ** np.floor(np.log2(largest)) if largest else 0.0
            rounding = max(2 * _distance(one, other), 1.5 * last_place)
            self.allowed.append(rounding + eps * largest)

    def mismatch(self, result: PyTree) -> str | None:
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


def by_xla(inv: Invocation) -> Choice | None:
    """XLA's choice for the call, whatever its platform; None for an op that XLA does not have."""
    inputs = inv.inputs
    supported, _ = inv.op.supporting(
        inv.direction, inputs, inv.spec, inv.device, Platform.XLA.value
    )
    if not supported:
        return None
    source, run = supported[0]
    return Choice(source, run, run.heuristic(inputs, inv.spec, inv.device))


def is_deterministic(inv: Invocation, choice: Choice) -> bool:
    """Whether the choice is declared to give the same bits in every run: docs/determinism.md."""
    if choice.source.platform not in (Platform.PALLAS, Platform.TRITON) or not inv.op.reference:
        return False
    varying = choice.run.nondeterministic(inv.inputs, inv.spec, inv.device)
    return varying is None or choice.params != varying


@jax.jit
def same_bits(result: PyTree, other: PyTree) -> jax.Array:
    """Whether two results are equal bit by bit."""
    pairs = zip(_arrays(result), _arrays(other), strict=True)
    return jnp.array([(_bits(x) == _bits(y)).all() for x, y in pairs]).all()


def _bits(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


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
