"""Checks of what callers pass to `MaskInfo`; every message names the method that was called."""

import operator
import reprlib
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from ejkernel.types.rule_arrays import bounded

# What `jax.numpy.asarray` takes: an array, a number, or nested lists of them.
ArrayValues = ArrayLike | Sequence[Any]

# A window as callers give it: one number for both sides, or a pair (left, right). Each may be
# traced; a pair may also be one array of two integers.
SlidingWindow = ArrayLike | tuple[ArrayLike, ArrayLike] | list[Any]

_INT32 = np.iinfo(np.int32)
_Integers = TypeVar("_Integers", np.ndarray, jax.Array)


def concrete(value: object) -> bool:
    """Whether no part of `value` is being traced."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))


def host_values(value: ArrayValues) -> np.ndarray | None:
    """The values, where looking at them is free: NumPy, or an array on a CPU device; else None."""
    if not isinstance(value, jax.Array):
        return np.asarray(value)
    if not concrete(value) or not value.is_fully_addressable:
        return None
    if any(device.platform != "cpu" for device in value.devices()):
        return None
    return np.asarray(value)


def as_array(where: str, value: object) -> jax.Array:
    """A JAX array of numbers."""
    if isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        kind = type(value).__name__
        raise ValueError(f"{where} must be an array of numbers, got {kind}.") from None


def flag(where: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{where} must be True or False, got {reprlib.repr(value)}.")
    return bool(value)


def known_dtype(where: str, value: object) -> np.dtype:
    """A dtype; Python's types stand for the dtypes that JAX gives to Python's numbers."""
    if isinstance(value, type) and value in (bool, int, float, complex):
        return jnp.result_type(value)
    try:
        return jnp.dtype(value)  # pyright: ignore[reportCallIssue, reportArgumentType]
    except TypeError:
        raise ValueError(f"{where} must be a dtype, got {reprlib.repr(value)}.") from None


def static_integer(where: str, value: ArrayValues, least: int) -> int:
    """A Python int of at least `least`."""
    try:
        number = operator.index(value)  # type: ignore
    except (TypeError, jax.errors.ConcretizationTypeError):
        raise ValueError(f"{where} must be a Python integer, got {value!r}.") from None
    if number < least:
        raise ValueError(f"{where} must be at least {least}, got {number}.")
    return number


def to_int32(values: _Integers) -> _Integers:
    """An array of integers as int32, values beyond its range as its ends; others as they are."""
    if values.dtype == jnp.int32 or not jnp.issubdtype(values.dtype, jnp.integer):
        return values
    inside: Any = values
    limits = jnp.iinfo(values.dtype)
    if limits.max > _INT32.max:
        inside = values.clip(max(int(limits.min), int(_INT32.min)), int(_INT32.max))
        if isinstance(values, np.ndarray):
            inside = np.asarray(inside)  # of an array without axes NumPy makes a scalar
    return inside.astype(jnp.int32)


def host_integers(values: object) -> np.ndarray | None:
    """What is an array of integers, or lists of them, and not yet JAX's, in its own dtype."""
    if isinstance(values, jax.Array):
        return None
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # a list of tracers, or ragged
        return None
    return array if array.dtype.kind in "iu" else None


def int_or_traced(value: object) -> int | jax.Array | None:
    """One integer: an int where it is known, an int32 array of rank 0 where it is traced.

    Both are clipped by `bounded`. None for whatever is not one integer. An array that other
    processes hold counts as traced.
    """
    if isinstance(value, jax.Array) and not (concrete(value) and value.is_fully_addressable):
        if value.ndim or not jnp.issubdtype(value.dtype, jnp.integer):
            return None
        return jnp.asarray(bounded(to_int32(value)))
    try:
        return int(bounded(operator.index(value)))  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def window_pair(where: str, window: object) -> tuple[int | jax.Array, int | jax.Array]:
    """A window as (left, right); one number stands for both sides.

    Args:
        where: how errors begin.
        window: what the caller gave, a `SlidingWindow`.

    Returns:
        Static ints for what is known, int32 arrays of rank 0 for what is traced.

    Raises:
        ValueError: if it is neither an integer nor a pair of them, or is known to be negative.
    """
    given: Any = window
    if isinstance(given, np.ndarray | jax.Array) and given.shape == (2,):
        sides = [given[0], given[1]]
    else:
        sides = list(given) if isinstance(given, tuple | list) else [given, given]
    numbers = [int_or_traced(side) for side in sides]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        raise ValueError(f"{where} must be an int or a pair (left, right) of ints, got {window!r}.")
    if any(isinstance(side, int) and side < 0 for side in numbers):
        raise ValueError(f"{where} must not be negative, got {window!r}.")
    return numbers[0], numbers[1]


def boolean(where: str, mask: ArrayValues, otherwise: str = "") -> jax.Array:
    """A mask of booleans or integers as booleans, True where it is not 0.

    Args:
        where: how the error begins.
        mask: the mask; numbers that are added to logits, 0 and -inf, are easily taken for one.
        otherwise: how the error ends, where the caller has an argument for such numbers.

    Raises:
        ValueError: if it holds floats.
    """
    array = as_array(where, mask)
    if array.dtype != jnp.bool_ and not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{where} must be boolean, or integers 0 and 1, got {array.dtype}; "
            f".astype(bool) makes a mask of 0 and 1 boolean{otherwise}."
        )
    return array if array.dtype == jnp.bool_ else array != 0


def integers(where: str, values: ArrayValues, rank: int) -> jax.Array:
    """An int32 array of a given rank; what is known to be out of its range is refused."""
    host = host_integers(values)
    array = as_array(where, values if host is None else to_int32(host))
    known = host_values(array) if host is None and array.dtype.itemsize >= 4 else host
    if known is not None and known.dtype != np.int32 and known.dtype.kind in "iu":
        wrong = known[(known > _INT32.max) | (known < _INT32.min)]
        if wrong.size:
            raise ValueError(f"{where} must fit in int32, got {wrong.flat[0]}.")
    if array.ndim != rank or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{where} must be an array of integers of rank {rank}, "
            f"got {array.dtype} of shape {array.shape}."
        )
    return to_int32(array)


def numbers(where: str, value: ArrayValues, batch: int | None) -> int | jax.Array:
    """A number as a Python int, or one number per batch row as an int32 array.

    Args:
        where: how errors begin.
        value: an integer, or an array of them of rank 0 or 1.
        batch: size of the mask's batch; None inside `vmap`, where an array must be one number.

    Returns:
        A static int for what is known at trace time; an array `[b]`, or `[]` without a batch axis.
        Where the mask has a batch of 1, `b` is the length that was given. Numbers beyond any
        length are clipped by `bounded`.
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(bounded(int(value)))
    host = host_integers(value)
    array = as_array(where, value if host is None else to_int32(host))
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{where} must be an integer or an array of integers, got {value!r}.")
    array = jnp.asarray(bounded(to_int32(array)))
    if batch is None:
        if array.ndim != 0:
            raise ValueError(f"{where} must be one number per row, got shape {array.shape}.")
        return array
    if array.ndim > 1 or (array.ndim == 1 and batch != 1 and array.shape[0] not in (1, batch)):
        raise ValueError(
            f"{where} must be one number or one per batch row, {batch} of them, "
            f"got shape {array.shape}."
        )
    return jnp.broadcast_to(array, (max(batch, array.size),))


def choice(where: str, value: object, allowed: Collection[object]) -> None:
    """Refuse a value that is none of `allowed`."""
    if value not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ValueError(f"{where} must be one of {names}, got {value!r}.")
