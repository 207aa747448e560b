"""How far a result lies from its definition, and how far it may.

The reference in float64 is the truth. The reference with inputs, matmul results and weights rounded
to the tested dtype shows the error that this dtype cannot avoid; twice that, plus a floor of some
float32 roundings of the largest value, is allowed.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.invocation import Invocation

_EPS = float(np.finfo(np.float32).eps)
VALUE_FLOOR, GRADIENT_FLOOR = 32 * _EPS, 128 * _EPS

Run = Callable[[Any], Any]  # inputs -> outputs


class Deviation(NamedTuple):
    """The largest error of some arrays, relative to their largest value, and what is allowed."""

    error: float
    allowed: float

    @property
    def fine(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        return f"{self.error:.0e}, {self.allowed:.0e} allowed"


class Truth(NamedTuple):
    """Outputs and gradients of a call: in float64, and rounded on the way as its dtype must."""

    values: list[np.ndarray]
    gradients: list[np.ndarray]
    rounded_values: list[np.ndarray]
    rounded_gradients: list[np.ndarray]

    def of_values(self, outputs: Any) -> Deviation:
        """The worst of the outputs."""
        return _worst(outputs, self.values, self.rounded_values, VALUE_FLOOR)

    def of_gradients(self, gradients: Any) -> Deviation:
        """The worst of the gradients."""
        return _worst(gradients, self.gradients, self.rounded_gradients, GRADIENT_FLOOR)


def with_dtype(tree: Any, dtype: Any) -> Any:
    """The tree with its floating-point leaves in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if _is_float(x) else x, tree)


def definition(call: Invocation) -> Run:
    """The reference of a call, as a function of its inputs."""
    forward = _reference(call)
    return lambda inputs: forward(inputs, call.spec)


def with_gradients(run: Run) -> Callable[[Any], tuple[Any, list]]:
    """Outputs, and the gradients of every floating input along a fixed direction."""

    def both(inputs: Any) -> tuple[Any, list]:
        leaves, treedef = jax.tree.flatten(inputs)
        chosen = [_is_float(x) for x in leaves]

        def of_floats(floats: list) -> Any:
            rest = iter(floats)
            merged = [next(rest) if f else x for f, x in zip(chosen, leaves, strict=True)]
            return run(jax.tree.unflatten(treedef, merged))

        floats = [x for f, x in zip(chosen, leaves, strict=True) if f]
        outputs, pull_back = jax.vjp(of_floats, floats)
        return outputs, pull_back(jax.tree.map(_direction, outputs))[0]

    return both


def truth(call: Invocation, dtype: Any) -> Truth:
    """What the reference gives for a call whose inputs hold values of `dtype`."""
    forward = _reference(call)

    def evaluate(round_to: Callable[[jax.Array], jax.Array]) -> tuple[list, list]:
        run = with_gradients(lambda x: forward(x, call.spec, round=round_to))
        outputs, gradients = jax.jit(run)(with_dtype(call.inputs, jnp.float64))
        return _arrays(outputs), _arrays(gradients)

    with jax.enable_x64(True):
        exact = evaluate(lambda x: x)
        rounded = evaluate(lambda x: x.astype(dtype).astype(x.dtype))
    return Truth(*exact, *rounded)


def _reference(call: Invocation) -> Callable[..., Any]:
    return importlib.import_module(str(call.op.reference)).forward


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _direction(x: jax.Array) -> jax.Array:
    """A direction with no symmetry, the same in every dtype up to rounding."""
    angles = np.arange(x.size, dtype=np.float64).reshape(x.shape)
    return jnp.asarray(np.cos(angles).astype(np.float32), x.dtype)


def _arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def _distance(actual: np.ndarray, exact: np.ndarray) -> float:
    """Largest difference; equal infinities do not differ, a NaN differs from everything."""
    with np.errstate(invalid="ignore"):
        gap = np.where(actual == exact, 0.0, np.abs(actual - exact))
    return float("inf") if np.isnan(gap).any() else float(gap.max(initial=0.0))


def _worst(tree: Any, exact: list, rounded: list, floor: float) -> Deviation:
    found = []
    for got, right, coarse in zip(_arrays(tree), exact, rounded, strict=True):
        largest = float(np.abs(right[np.isfinite(right)]).max(initial=0.0)) or 1.0
        allowed = 2 * _distance(coarse, right) + floor * largest
        error = _distance(got, right) if got.shape == right.shape else float("inf")
        found.append(Deviation(error / largest, allowed / largest))
    return max(found, key=lambda one: one.error / one.allowed)
