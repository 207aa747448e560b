"""What a result must be, and how far from it a right one may lie.

The definition in float64 is the truth. The definition with inputs, matmul results and weights
rounded to the tested dtype shows what error that dtype cannot avoid; twice that, plus a floor of
some float32 roundings, is the most that an implementation may show.
"""

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from conformance.cases import Case, cast, floating

EPS = float(np.finfo(np.float32).eps)
VALUE_FLOOR, GRADIENT_FLOOR = 32 * EPS, 128 * EPS


class Expected(NamedTuple):
    """Truth and rounded truth: outputs, then gradients of the floating inputs."""

    values: list[np.ndarray]
    gradients: list[np.ndarray]
    rounded_values: list[np.ndarray]
    rounded_gradients: list[np.ndarray]


def cotangents(outputs: Any) -> Any:
    """A fixed direction in which to pull gradients back."""
    leaves, treedef = jax.tree.flatten(outputs)
    drawn = [
        np.random.default_rng(i).standard_normal(x.shape).astype(np.float32)
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, drawn)


def value_and_gradients(run: Any, inputs: Any) -> tuple[Any, list]:
    """Outputs of `run(inputs)`, and the gradients of its floating inputs along `cotangents`."""
    leaves, treedef = jax.tree.flatten(inputs)
    chosen = floating(inputs)

    def of_floats(floats: list) -> Any:
        rest = iter(floats)
        merged = [next(rest) if f else x for f, x in zip(chosen, leaves, strict=True)]
        return run(jax.tree.unflatten(treedef, merged))

    floats = [x for f, x in zip(chosen, leaves, strict=True) if f]
    outputs, pull_back = jax.vjp(of_floats, floats)
    along = jax.tree.map(lambda c, x: jnp.asarray(c, x.dtype), cotangents(outputs), outputs)
    return outputs, pull_back(along)[0]


def arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def expected(case: Case, dtype: Any) -> Expected:
    """The definition in float64, exact and rounded to `dtype`."""
    return Expected(*_defined(case, None), *_defined(case, dtype))


@functools.cache
def _defined(case: Case, dtype: Any) -> tuple[list, list]:
    define = importlib.import_module(str(case.op.reference)).forward
    call = case.call()

    def rounded(x: Any) -> Any:
        return x if dtype is None else x.astype(dtype).astype(x.dtype)

    with jax.enable_x64(True):
        # Not jitted: its few operations are compiled once for all the workloads of a shape.
        outputs, gradients = value_and_gradients(
            lambda x: define(x, call.spec, round=rounded), cast(call.inputs, jnp.float64)
        )
        return arrays(outputs), arrays(gradients)


def distance(actual: np.ndarray, truth: np.ndarray) -> float:
    """Largest difference; equal infinities do not differ, a NaN differs from everything."""
    with np.errstate(invalid="ignore"):
        gap = np.where(actual == truth, 0.0, np.abs(actual - truth))
    return float(gap.max(initial=0.0)) if not np.isnan(gap).any() else np.inf


def assert_as_good_as(actual: Any, truth: list, rounded: list, floor: float, what: str) -> None:
    """Every array is as near the truth as its dtype allows."""
    actual = arrays(actual)
    assert len(actual) == len(truth), what
    for i, (got, exact, coarse) in enumerate(zip(actual, truth, rounded, strict=True)):
        assert got.shape == exact.shape, f"{what} {i}: shape {got.shape} instead of {exact.shape}"
        finite = np.abs(exact[np.isfinite(exact)])
        allowed = 2 * distance(coarse, exact) + floor * float(finite.max(initial=0.0))
        error = distance(got, exact)
        assert error <= allowed, f"{what} {i}: off by {error:.3e}, allowed {allowed:.3e}"


def assert_same(actual: Any, other: Any, floor: float, what: str) -> None:
    """Two runs of one implementation agree up to a few float32 roundings."""
    for i, (a, b) in enumerate(zip(arrays(actual), arrays(other), strict=True)):
        finite = np.abs(b[np.isfinite(b)])
        allowed = floor * float(finite.max(initial=0.0))
        assert distance(a, b) <= allowed, f"{what} {i}: {distance(a, b):.3e} > {allowed:.3e}"
