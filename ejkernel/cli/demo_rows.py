"""What `ejkernel demo` measures of one operation.

The truth is plain JAX in float64. The largest error of ours, relative to the largest value, may be
twice that of plain JAX in the same dtype plus the floor of `oracle`.
"""

import concurrent.futures
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel.cli import measure, oracle, subjects
from ejkernel.cli.baseline import Baseline, normal
from ejkernel.cli.oracle import Deviation, Tree
from ejkernel.ops import default_executor, record_invocations
from ejkernel.ops.implementation import Choice
from ejkernel.ops.invocation import Invocation

_TIMED_SECONDS = 0.3  # for each of forward and gradient, ours and plain JAX together


class Comparison(NamedTuple):
    """Seconds of one run, and how much plain JAX takes for the same."""

    seconds: float
    plain_seconds: float

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds


class Row(NamedTuple):
    """One operation, measured."""

    operation: str
    platforms: tuple[str, str]  # of forward and backward
    configuration: str
    missing: tuple[str, ...]  # devices that other platforms need
    unavailable: tuple[str, ...]  # platforms for this device, and why they did not run
    deviation: Deviation  # of the outputs and gradients, the one nearest to its allowance
    forward: Comparison
    gradient: Comparison
    memory: float  # of the gradient in plain JAX, relative to ours


class _Programs(NamedTuple):
    """One side of the comparison, compiled; both take the same arguments."""

    forward: jax.stages.Compiled
    gradient: jax.stages.Compiled


class _Arguments(NamedTuple):
    """The arrays of a call by name, and the gradients of its outputs."""

    floats: dict[str, Any]
    integers: dict[str, Any]
    d_outputs: Any

    def on_host(self, dtype: DTypeLike) -> "_Arguments":
        """In NumPy, floating-point arrays in this dtype."""
        convert = lambda x: np.asarray(x, dtype if jnp.issubdtype(x.dtype, jnp.floating) else None)
        return jax.tree.map(convert, self)


def default_dtype() -> DTypeLike:
    """What models use on this device."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def measure_row(
    operation: str,
    baseline: Baseline,
    report: Callable[[str], None] = lambda step: None,
) -> Row:
    """Compile, check and time one operation; `report` is told which of them begins."""
    dtype = default_dtype()
    arguments = jax.device_put(draw(baseline, baseline.tokens).on_host(dtype))
    report("compiling")
    ours, plain, truth, calls = _compile(baseline, arguments)
    report("checking")
    results = [[program(*arguments) for program in side] for side in (ours, plain)]
    with oracle.on_the_host(), jax.enable_x64(True):
        exact = truth(*arguments.on_host(jnp.float64))
    deviations = list(_deviations(results[0], results[1], exact, dtype))
    del results, exact
    report("timing")
    forward = _compare(ours.forward, plain.forward, arguments)
    gradient = _compare(ours.gradient, plain.gradient, arguments)
    choices = _choices(calls)
    peaks = [measure.memory(side.gradient).peak for side in (ours, plain)]
    return Row(
        operation,
        (choices[0].source.platform.value, choices[-1].source.platform.value),
        _configuration(choices),
        *_alternatives(calls),
        oracle.worst(deviations),
        forward,
        gradient,
        peaks[1] / peaks[0],
    )


def draw(baseline: Baseline, tokens: int) -> _Arguments:
    """The arrays of the call with this many tokens, in float32."""
    arrays = baseline.arrays(tokens)
    floats = {k: x for k, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    integers = {k: x for k, x in arrays.items() if k not in floats}
    outputs, treedef = jax.tree.flatten(jax.eval_shape(baseline.plain, **arrays))
    d_outputs = [normal(*x.shape, seed=9 + i) for i, x in enumerate(outputs)]
    return _Arguments(floats, integers, jax.tree.unflatten(treedef, d_outputs))


def forward_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The call as a function of `_Arguments`."""
    return lambda floats, integers, d_outputs: function(**floats, **integers)


def gradient_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The outputs of the call and the gradients of all floating-point arrays."""

    def run(
        floats: dict[str, jax.Array], integers: dict[str, jax.Array], d_outputs: Tree
    ) -> tuple[Tree, dict[str, jax.Array]]:
        outputs, pull_back = jax.vjp(lambda floats: function(**floats, **integers), floats)
        d_outputs = jax.tree.map(lambda d, x: d.astype(x.dtype), d_outputs, outputs)
        return outputs, pull_back(d_outputs)[0]

    return run


def _compile(
    baseline: Baseline, arguments: _Arguments
) -> tuple[_Programs, _Programs, Any, list[Invocation]]:
    """Ours, plain JAX and the truth, compiled at the same time, and the calls that ours makes."""
    with record_invocations() as calls:
        lowered = [
            jax.jit(of(function)).lower(*arguments)
            for function in (baseline.ours, baseline.plain)
            for of in (forward_of, gradient_of)
        ]
    with oracle.on_the_host(), jax.enable_x64(True):
        wide = arguments.on_host(jnp.float64)
        lowered.append(jax.jit(gradient_of(baseline.plain)).lower(*wide))
    # The truth runs once: it is compiled quickly, the others as they are for users.
    options = [{}, {}, {}, {}, {"xla_backend_optimization_level": 1}]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda x, options: x.compile(options), lowered, options))
    return _Programs(*programs[:2]), _Programs(*programs[2:4]), programs[4], list(calls.values())


def _deviations(
    ours: list[Any], plain: list[Any], exact: tuple[Any, Any], dtype: DTypeLike
) -> Iterator[Deviation]:
    """The deviation of the outputs of both programs, and of the gradients."""
    outputs, gradients = exact
    for get, truth, floor in (
        (lambda results: results[0], outputs, oracle.VALUE_FLOOR),
        (lambda results: results[1], (outputs, gradients), oracle.GRADIENT_FLOOR),
    ):
        arrays = (oracle.arrays(x) for x in (get(ours), get(plain), truth))
        for got, baseline, true in zip(*arrays, strict=True):
            yield _deviation(got, baseline, true, floor, dtype)


def _deviation(
    got: np.ndarray, plain: np.ndarray, exact: np.ndarray, floor: float, dtype: DTypeLike
) -> Deviation:
    size = oracle.largest(exact) or 1.0
    error, unavoidable = (oracle.distance(x, exact) / size for x in (got, plain))
    most = floor * float(jnp.finfo(dtype).eps / jnp.finfo(jnp.float32).eps)
    if not unavoidable <= most:
        raise measure.WrongResultError(f"plain JAX is off by {Deviation(unavoidable, most)}")
    return Deviation(error, 2 * unavoidable + floor)


def _compare(
    ours: jax.stages.Compiled, plain: jax.stages.Compiled, arguments: _Arguments
) -> Comparison:
    runs = [functools.partial(program, *arguments) for program in (ours, plain)]
    return Comparison(*measure.alternating(*runs, seconds=_TIMED_SECONDS))


def _choices(calls: list[Invocation]) -> list[Choice]:
    """What forward and backward run with; one alone where the backward is part of the forward."""
    by_direction = {call.direction: default_executor().chooser.choose(call) for call in calls}
    return [by_direction[x] for x in ("forward", "backward") if x in by_direction]


def _configuration(choices: list[Choice]) -> str:
    """The parameters of the forward pass, and where they differ those of the backward."""
    texts = []
    for choice in choices:
        params = choice.params.to_dict() if hasattr(choice.params, "to_dict") else {}
        short = {name.replace("_blocksize", ""): x for name, x in params.items()}
        numbers = {name: x for name, x in short.items() if isinstance(x, int) and x}
        texts.append(" ".join(f"{name}={x}" for name, x in numbers.items()))
    return "; ".join(dict.fromkeys(text for text in texts if text)) or "-"


def _alternatives(calls: list[Invocation]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The devices that are missing, and why platforms for this device are unavailable."""
    missing, unavailable = set(), {}
    for call in calls:
        _, reasons = call.op.supporting(call.direction, call.inputs, call.spec, call.device, None)
        for source in call.op.sources:
            reason = reasons.get(subjects.label(source))
            if source.unavailable_on(call.device):
                missing.add(source.backend.value.upper())
            elif reason:
                unavailable[f"{source.platform.value}: {reason}"] = None
    return tuple(sorted(missing)), tuple(unavailable)
