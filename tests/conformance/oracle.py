"""What a result must be, and how far from it a right one may lie.

The definition in float64 is the truth. The definition with inputs, matmul results and weights
rounded to the tested dtype shows what error that dtype cannot avoid; twice that, plus a floor of
some float32 roundings, is the most that an implementation may show.
"""

import functools
import importlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from conformance.cases import Case, cast, floating

EPS = float(np.finfo(np.float32).eps)
VALUE_FLOOR, GRADIENT_FLOOR = 32 * EPS, 128 * EPS
SEEDS = (0, 1, 2, 3)


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


@functools.cache
def defined(case: Case, dtype: Any = None, seed: int = 0) -> tuple[list, list]:
    """Outputs and gradients of the definition in float64, rounded to `dtype` if one is given."""
    define = importlib.import_module(str(case.op.reference)).forward
    call = case.call(seed=seed)

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


def largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def assert_as_good_as_rounding(
    case: Case, dtype: Any, which: Literal["values", "gradients"], actual: Any, what: str = ""
) -> None:
    """Every array is as near the truth as its dtype allows."""
    part, floor = (0, VALUE_FLOOR) if which == "values" else (1, GRADIENT_FLOOR)
    actual, truth = arrays(actual), defined(case)[part]
    assert len(actual) == len(truth), what
    for i, (got, exact) in enumerate(zip(actual, truth, strict=True)):
        assert got.shape == exact.shape, f"{what} {i}: shape {got.shape} instead of {exact.shape}"
        error = distance(got, exact)
        for seed in SEEDS:
            # The error that rounding makes of a few numbers can be small by luck: look again.
            unavoidable = max(_rounding_error(case, dtype, s, part, i) for s in SEEDS[: seed + 1])
            # What cancels to zero is measured by the size of its neighbours.
            size = largest(exact) or max(map(largest, truth))
            allowed = (2 * unavoidable + floor) * size
            if error <= allowed:
                break
        else:
            raise AssertionError(f"{which} {i} {what}: off by {error:.3e}, allowed {allowed:.3e}")


def _rounding_error(case: Case, dtype: Any, seed: int, part: int, i: int) -> float:
    """What rounding to `dtype` costs, relative to the largest number of the result."""
    exact, coarse = defined(case, None, seed)[part][i], defined(case, dtype, seed)[part][i]
    return distance(coarse, exact) / (largest(exact) or 1.0)


def assert_same(actual: Any, other: Any, floor: float, what: str) -> None:
    """Two runs of one implementation agree up to a few float32 roundings."""
    for i, (a, b) in enumerate(zip(arrays(actual), arrays(other), strict=True)):
        allowed = floor * largest(b)
        assert distance(a, b) <= allowed, f"{what} {i}: {distance(a, b):.3e} > {allowed:.3e}"
