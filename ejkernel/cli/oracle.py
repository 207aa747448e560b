"""How far a result lies from its definition, and how far it may.

The reference in float64 is the truth. The reference with inputs, matmul results and weights rounded
to the tested dtype shows the error that this dtype cannot avoid; twice that, plus a floor of some
float32 roundings of the largest value, is allowed.

A gradient of a random call may also have twice the error that comes from keeping the residuals in
the tested dtype: where a query sees a single key, the gradient of its logit is what is left of two
numbers that cancel, one of them from the stored output.
"""

import contextlib
import importlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel.ops.implementation import CallInputs
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.platform import Platform, device_of

_EPS = float(np.finfo(np.float32).eps)
VALUE_FLOOR, GRADIENT_FLOOR = 32 * _EPS, 128 * _EPS
_SEEDS = (0, 1, 2, 3)
# A cast to a narrow dtype and back is a rounding that is wanted here, and XLA may drop such pairs.
_EXACT_CASTS = {"xla_allow_excess_precision": False}

Dtype = Literal["float32", "bfloat16", "float16"]  # of the arrays of a call
Run = Callable[[Any], Any]  # inputs -> outputs
Arrays = list[np.ndarray]
Tree = TypeVar("Tree")  # a pytree of arrays


class Deviation(NamedTuple):
    """The largest error of an array, relative to its largest value, and what is allowed."""

    error: float
    allowed: float

    @property
    def fine(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        return f"{self.error:.1e}, {self.allowed:.1e} allowed"


class Truth:
    """What the definition gives for a call; `draw(seed)` is that call in float32.

    With `stored_residuals`, what it costs to keep those in the tested dtype is allowed too.
    """

    def __init__(self, draw: Callable[[int], Invocation], stored_residuals: bool = False) -> None:
        self._draw, self._stored_residuals = draw, stored_residuals
        self._known: dict[tuple[int, DTypeLike | None], tuple[Arrays, Arrays]] = {}
        self._kept: dict[tuple[int, DTypeLike], tuple[Arrays, Arrays]] = {}

    def of_values(self, outputs: object, dtype: DTypeLike) -> list[Deviation]:
        """The deviation of each output, computed in `dtype`."""
        return self._deviations(0, outputs, dtype, VALUE_FLOOR)

    def of_gradients(self, gradients: object, dtype: DTypeLike) -> list[Deviation]:
        """The deviation of each gradient, computed in `dtype`."""
        return self._deviations(1, gradients, dtype, GRADIENT_FLOOR)

    def _deviations(
        self, part: int, tree: object, dtype: DTypeLike, floor: float
    ) -> list[Deviation]:
        truth, found = self._results(0)[part], []
        for i, (got, exact) in enumerate(zip(arrays(tree), truth, strict=True)):
            # If the exact result is zero, the error is relative to the largest of all results.
            size = largest(exact) or max(map(largest, truth)) or 1.0
            error = distance(got, exact) / size if got.shape == exact.shape else float("inf")
            unavoidable = 0.0
            # The error that rounding makes of a few numbers can be small by luck: look again.
            for stored, seed in itertools.product((False, True), _SEEDS):
                if error <= 2 * unavoidable + floor:
                    break
                if not stored:
                    unavoidable = max(unavoidable, self._rounding(part, i, dtype, seed))
                elif part and self._stored_residuals:
                    unavoidable = max(unavoidable, self._storing(i, dtype, seed))
            found.append(Deviation(error, 2 * unavoidable + floor))
        return found

    def _rounding(self, part: int, i: int, dtype: DTypeLike, seed: int) -> float:
        """What rounding to `dtype` costs, relative to the largest number of the result."""
        exact, coarse = (self._results(seed, to)[part][i] for to in (None, dtype))
        return distance(coarse, exact) / (largest(exact) or 1.0)

    def _storing(self, i: int, dtype: DTypeLike, seed: int) -> float:
        """What residuals that are kept in `dtype` cost a gradient, relative to its largest number.

        Nothing, if the gradient of XLA is wrong even with exact residuals.
        """
        truth = self._results(seed)[1][i]
        size = largest(truth) or 1.0
        exact, kept = (found[i] for found in self._backwards(seed, dtype))
        if distance(exact, truth) > GRADIENT_FLOOR * size:
            return 0.0
        return distance(kept, exact) / size

    def _backwards(self, seed: int, dtype: DTypeLike) -> tuple[Arrays, Arrays]:
        """Gradients by XLA in float64, from exact residuals and from those kept in `dtype`."""
        if (seed, dtype) not in self._kept:
            call = self._draw(seed)
            with on_the_host(), jax.enable_x64(True):
                run = jax.jit(_backwards(call, dtype), compiler_options=_EXACT_CASTS)
                exact, kept = run(with_dtype(moved(call.inputs), jnp.float64))
                self._kept[seed, dtype] = arrays(exact), arrays(kept)
        return self._kept[seed, dtype]

    def _results(self, seed: int, dtype: DTypeLike | None = None) -> tuple[Arrays, Arrays]:
        """Outputs and gradients in float64, rounded to `dtype` on the way if one is given."""
        if (seed, dtype) not in self._known:
            call = self._draw(seed)
            forward = _reference(call)
            rounded = lambda x: x if dtype is None else x.astype(dtype).astype(x.dtype)
            with on_the_host(), jax.enable_x64(True):
                run = jax.jit(
                    with_gradients(lambda x: forward(x, call.spec, round=rounded)),
                    compiler_options=_EXACT_CASTS,
                )
                outputs, gradients = run(with_dtype(moved(call.inputs), jnp.float64))
                self._known[seed, dtype] = arrays(outputs), arrays(gradients)
        return self._known[seed, dtype]


def _backwards(call: Invocation, dtype: DTypeLike) -> Callable[[Any], tuple[Any, Any]]:
    """Gradients by the passes of XLA, from its residuals and from the same kept in `dtype`."""
    device = device_of(jax.tree.leaves(call.inputs))
    forward, backward = (
        call.op.supporting(direction, call.inputs, call.spec, device, Platform.XLA)[0][0]
        for direction in ("forward", "backward")
    )
    (source, first), (_, second) = forward, backward

    def residuals_of(inputs: CallInputs) -> tuple[Any, Any]:
        params = first.guess(inputs, call.spec, device)
        return source.load().run_with_residuals(inputs, call.spec, params, device=device)

    def both(inputs: CallInputs) -> tuple[Any, Any]:
        outputs, exact = residuals_of(inputs)
        narrow = jax.eval_shape(lambda: residuals_of(with_dtype(inputs, dtype)))[1]
        kept = jax.tree.map(lambda x, like: x.astype(like.dtype).astype(x.dtype), exact, narrow)
        params, along = second.guess(inputs, call.spec, device), direction(outputs)
        run = lambda residuals: second(inputs, residuals, along, call.spec, params, device=device)
        return _of_floats(inputs, run(exact)), _of_floats(inputs, run(kept))

    return both


def _of_floats(inputs: Any, gradients: Any) -> list[jax.Array]:
    """The gradients of the floating inputs; 0 where a backward pass gives none."""
    pairs = [
        (x, getattr(gradients, name))
        for name, x in zip(inputs._fields, inputs, strict=True)
        if hasattr(x, "dtype") and _is_float(x)
    ]
    return [jnp.zeros_like(x) if gradient is None else gradient for x, gradient in pairs]


def on_the_host() -> AbstractContextManager[object]:
    """New arrays are on the CPU, which compiles many small operations faster than accelerators."""
    if jax.default_backend() == "cpu":  # to set the device would compile everything again
        return contextlib.nullcontext()
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        return contextlib.nullcontext()


def moved(tree: Tree) -> Tree:
    """The arrays on the default device."""
    if jax.default_backend() == "cpu":
        return tree
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


def worst(deviations: list[Deviation]) -> Deviation:
    """The one that is farthest beyond, or nearest to, what is allowed."""
    return max(deviations, key=lambda one: one.error / one.allowed)


def with_dtype(tree: Tree, dtype: DTypeLike) -> Tree:
    """The tree with its floating-point leaves in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if _is_float(x) else x, tree)


def definition(call: Invocation) -> Run:
    """The reference of a call, as a function of its inputs."""
    forward = _reference(call)
    return lambda inputs: forward(inputs, call.spec)


def with_gradients(run: Run) -> Callable[[Any], tuple[Any, list[jax.Array]]]:
    """Outputs, and the gradients of every floating input along a fixed direction."""

    def both(inputs: CallInputs) -> tuple[Any, list[jax.Array]]:
        leaves, treedef = jax.tree.flatten(inputs)
        chosen = [_is_float(x) for x in leaves]

        def of_floats(floats: list[jax.Array]) -> Any:
            rest = iter(floats)
            merged = [next(rest) if f else x for f, x in zip(chosen, leaves, strict=True)]
            return run(jax.tree.unflatten(treedef, merged))

        floats = [x for f, x in zip(chosen, leaves, strict=True) if f]
        outputs, pull_back = jax.vjp(of_floats, floats)
        return outputs, pull_back(direction(outputs))[0]

    return both


def direction(outputs: Tree) -> Tree:
    """Numbers in which to pull gradients back, the same in every dtype up to rounding."""
    leaves, treedef = jax.tree.flatten(outputs)
    drawn = [
        np.random.default_rng(i).standard_normal(x.shape).astype(np.float32)
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(
        treedef, [jnp.asarray(d, x.dtype) for d, x in zip(drawn, leaves, strict=True)]
    )


def arrays(tree: object) -> Arrays:
    """The leaves in float64."""
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def distance(actual: np.ndarray, exact: np.ndarray) -> float:
    """Largest difference; equal infinities do not differ, a NaN differs from everything."""
    with np.errstate(invalid="ignore"):
        gap = np.where(actual == exact, 0.0, np.abs(actual - exact))
    return float("inf") if np.isnan(gap).any() else float(gap.max(initial=0.0))


def largest(x: np.ndarray) -> float:
    """The size of the largest finite number."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def _reference(call: Invocation) -> Callable[..., Any]:
    return importlib.import_module(str(call.op.reference)).forward


def _is_float(x: jax.Array | np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
