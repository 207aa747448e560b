"""Arrays that are known when a call is traced, computed without compiling anything.

The tile lists and bounds of a mask without arrays depend on Python numbers alone. Functions that
compute them are written with `jax.numpy`, because masks with arrays need the same lists in the
compiled program. Run eagerly while a program is traced, each of their operations would be compiled
by itself, some 50 programs for one list; here their jaxpr is evaluated by NumPy.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import PyTree

from ejkernel.ops.timing import outside_trace

_Result = TypeVar("_Result", bound=PyTree)
_MOST_KEPT = 64  # results that are remembered


class _Placeholder:
    """Stands for an array in a result."""


def static_constants(function: Callable[..., _Result], *args: PyTree) -> _Result:
    """`static_arrays` as JAX arrays: constants of the program that is traced."""
    constant = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x
    return jax.tree.map(constant, static_arrays(function, *args))


def static_arrays(function: Callable[..., _Result], *args: PyTree) -> _Result:
    """`function(*args)` with NumPy arrays in place of JAX's, computed while a program is traced.

    Args:
        function: computes integers and booleans with `jax.numpy`; a function of a module, so that
            equal calls are computed once.
        *args: hashable values, or pytrees of them; no arrays.

    >>> import jax.numpy as jnp
    >>> static_arrays(lambda n: jnp.arange(n) // 2, 4)
    array([0, 0, 1, 1], dtype=int32)
    """
    leaves, treedef = jax.tree.flatten(args)
    return _computed(function, treedef, tuple(leaves), bool(jax.config.jax_enable_x64))  # pyright: ignore[reportAttributeAccessIssue]


@functools.lru_cache(_MOST_KEPT)
def _computed(
    function: Callable[..., Any], treedef: Any, leaves: tuple[Hashable, ...], x64: bool
) -> Any:
    rest: list[Any] = []  # of the result, without its arrays
    is_array = lambda x: isinstance(x, jax.Array | np.ndarray)

    def arrays() -> list[jax.Array]:
        result = function(*jax.tree.unflatten(treedef, leaves))
        rest.append(jax.tree.map(lambda x: _Placeholder() if is_array(x) else x, result))
        return [x for x in jax.tree.leaves(result) if is_array(x)]

    jaxpr = jax.make_jaxpr(arrays)()
    try:
        results = evaluate(jaxpr)
    except NotImplementedError:
        # What NumPy has no equivalent for here: one program, on the host.
        with jax.default_device(_host()):
            results = outside_trace(lambda: list(map(np.array, jax.jit(arrays)())))
    for result in results:
        result.flags.writeable = False  # the next caller gets the same arrays
    remaining = iter(results)
    fill = lambda x: next(remaining) if isinstance(x, _Placeholder) else x
    return jax.tree.map(fill, rest[0])


def _host() -> jax.Device | None:
    """The processor; None, the default device, in a process that has accelerators alone."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def evaluate(jaxpr: core.ClosedJaxpr, *arguments: np.ndarray) -> list[np.ndarray]:
    """The results of a jaxpr of integers and booleans, by NumPy.

    Raises:
        NotImplementedError: a primitive is not in the table below.
    """
    values: dict[core.Var, np.ndarray] = {}
    values.update(zip(jaxpr.jaxpr.constvars, map(np.asarray, jaxpr.consts), strict=True))
    values.update(zip(jaxpr.jaxpr.invars, arguments, strict=True))

    def read(atom: core.Var | core.Literal) -> np.ndarray:
        if isinstance(atom, core.Literal):
            return np.asarray(atom.val, _dtype(atom))
        return values[atom]

    for equation in jaxpr.jaxpr.eqns:
        name = equation.primitive.name
        if (run := _PRIMITIVES.get(name)) is None:
            raise NotImplementedError(f"static_arrays: no NumPy equivalent of {name}.")
        results = run(*map(read, equation.invars), **equation.params)
        if not equation.primitive.multiple_results:
            results = [results]
        for variable, result in zip(equation.outvars, results, strict=True):
            values[variable] = np.asarray(result, _dtype(variable))
    return [np.array(read(x)) for x in jaxpr.jaxpr.outvars]


def _dtype(atom: core.Var | core.Literal) -> np.dtype:
    dtype = getattr(atom.aval, "dtype", None)
    if dtype is None or dtype.kind not in "biu":
        raise NotImplementedError(f"static_arrays: a value of type {atom.aval}.")
    return np.dtype(dtype)


def _elementwise(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda *operands, **_: function(*operands)


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Towards zero, as XLA divides integers."""
    quotient = np.abs(x) // np.abs(y)
    return np.where((x < 0) != (y < 0), -quotient, quotient)


def _shift_right_logical(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return (x.view(unsigned) >> y.astype(unsigned)).view(x.dtype)


def _broadcast_in_dim(
    x: np.ndarray, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any
) -> np.ndarray:
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _iota(*, dtype: np.dtype, shape: Sequence[int], dimension: int, **_: Any) -> np.ndarray:
    sizes = [-1 if axis == dimension else 1 for axis in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape)


def _pad(
    x: np.ndarray, value: np.ndarray, *, padding_config: Sequence[tuple[Any, Any, Any]]
) -> np.ndarray:
    if any(low < 0 or high < 0 or interior for low, high, interior in padding_config):
        raise NotImplementedError("static_arrays: padding that removes or spreads elements.")
    widths = [(low, high) for low, high, _ in padding_config]
    return np.pad(x, widths, constant_values=value.item())


def _slice(
    x: np.ndarray,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
) -> np.ndarray:
    steps = strides or [1] * x.ndim
    bounds = zip(start_indices, limit_indices, steps, strict=True)
    return x[tuple(slice(*bound) for bound in bounds)]


def _dynamic_slice(
    x: np.ndarray, *starts: np.ndarray, slice_sizes: Sequence[int], **_: Any
) -> np.ndarray:
    """A slice that would pass the end begins earlier."""
    bounds = zip(starts, x.shape, slice_sizes, strict=True)
    first = [min(max(int(at), 0), size - count) for at, size, count in bounds]
    return x[tuple(slice(at, at + count) for at, count in zip(first, slice_sizes, strict=True))]


def _sort(*operands: np.ndarray, dimension: int, num_keys: int, **_: Any) -> list[np.ndarray]:
    """A stable order by the first `num_keys` operands is also an order."""
    keys = [np.moveaxis(x, dimension, -1) for x in reversed(operands[:num_keys])]
    order = np.moveaxis(np.lexsort(keys), -1, dimension)
    return [np.take_along_axis(x, order, dimension) for x in operands]


def _gather(x: np.ndarray, indices: np.ndarray, *, dimension_numbers: Any, **params: Any) -> Any:
    """Elements of a vector; the only gather in a list of tiles."""
    if x.ndim != 1 or tuple(params["slice_sizes"]) != (1,) or dimension_numbers.offset_dims:
        raise NotImplementedError("static_arrays: a gather of other than elements.")
    place = indices[..., 0]
    if ((place < 0) | (place >= x.size)).any():
        raise NotImplementedError("static_arrays: a gather past the end.")
    return x[place]


def _reduce(*operands: np.ndarray, jaxpr: Any, dimensions: Sequence[int], **params: Any) -> Any:
    """A reduction by any associative function: halves are combined until one element is left."""
    if len(dimensions) != 1:
        raise NotImplementedError("static_arrays: a reduction over several axes.")
    count = len(operands) // 2
    values, initial = list(operands[:count]), operands[count:]
    combine = core.ClosedJaxpr(jaxpr, params.get("consts", ()))
    values = [np.moveaxis(x, dimensions[0], 0) for x in values]
    while (size := values[0].shape[0]) > 1:
        half = size // 2
        pairs = evaluate(
            combine, *(x[:half] for x in values), *(x[half : 2 * half] for x in values)
        )
        values = [np.concatenate([y, x[2 * half :]]) for x, y in zip(values, pairs, strict=True)]
    if not size:
        return [np.broadcast_to(y, x.shape[1:]) for x, y in zip(values, initial, strict=True)]
    return evaluate(combine, *(x[0] for x in values), *initial)


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if len(cases) != 2:
        raise NotImplementedError("static_arrays: a selection among several arrays.")
    return np.where(which, cases[1], cases[0])


def _reduced_by(ufunc: np.ufunc) -> Callable[..., np.ndarray]:
    return lambda x, *, axes, **_: ufunc.reduce(x, axis=tuple(axes), dtype=x.dtype)


def _accumulated_by(ufunc: np.ufunc) -> Callable[..., np.ndarray]:
    def accumulate(x: np.ndarray, *, axis: int, reverse: bool, **_: Any) -> np.ndarray:
        if reverse:
            return np.flip(ufunc.accumulate(np.flip(x, axis), axis, dtype=x.dtype), axis)
        return ufunc.accumulate(x, axis, dtype=x.dtype)

    return accumulate


def _call(*operands: np.ndarray, **params: Any) -> list[np.ndarray]:
    inner = params.get("jaxpr") or params["call_jaxpr"]
    return evaluate(inner, *operands)


_PRIMITIVES: dict[str, Callable[..., Any]] = {
    "abs": _elementwise(np.abs),
    "add": _elementwise(np.add),
    "and": _elementwise(np.bitwise_and),
    "broadcast_in_dim": _broadcast_in_dim,
    "clamp": _elementwise(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "closed_call": _call,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
    "copy": _elementwise(np.array),
    "cummax": _accumulated_by(np.maximum),
    "cummin": _accumulated_by(np.minimum),
    "cumsum": _accumulated_by(np.add),
    "div": _elementwise(_divide),
    "dynamic_slice": _dynamic_slice,
    "eq": _elementwise(np.equal),
    "gather": _gather,
    "ge": _elementwise(np.greater_equal),
    "gt": _elementwise(np.greater),
    "iota": _iota,
    "jit": _call,
    "le": _elementwise(np.less_equal),
    "lt": _elementwise(np.less),
    "max": _elementwise(np.maximum),
    "min": _elementwise(np.minimum),
    "mul": _elementwise(np.multiply),
    "ne": _elementwise(np.not_equal),
    "neg": _elementwise(np.negative),
    "not": _elementwise(np.invert),
    "or": _elementwise(np.bitwise_or),
    "pad": _pad,
    "pjit": _call,
    "reduce": _reduce,
    "reduce_and": _reduced_by(np.bitwise_and),
    "reduce_max": _reduced_by(np.maximum),
    "reduce_min": _reduced_by(np.minimum),
    "reduce_or": _reduced_by(np.bitwise_or),
    "reduce_sum": _reduced_by(np.add),
    "rem": _elementwise(np.fmod),
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "rev": lambda x, *, dimensions: np.flip(x, tuple(dimensions)),
    "select_n": _elementwise(_select),
    "shift_left": _elementwise(np.left_shift),
    "shift_right_arithmetic": _elementwise(np.right_shift),
    "shift_right_logical": _elementwise(_shift_right_logical),
    "sign": _elementwise(np.sign),
    "slice": _slice,
    "sort": _sort,
    "squeeze": lambda x, *, dimensions: x.squeeze(tuple(dimensions)),
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "sub": _elementwise(np.subtract),
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "xor": _elementwise(np.bitwise_xor),
}
