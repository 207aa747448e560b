"""Checks that the attention operations share: one sentence for each mistake."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel.ops.config import Config
from ejkernel.xla_utils.concrete import concrete_value

# Of one array, of several, or left to be chosen.
Specs = PartitionSpec | tuple[PartitionSpec | None, ...] | None


def as_array(op: str, name: str, x: object) -> jax.Array:
    """A JAX array from a JAX or NumPy array, or from nested lists of numbers."""
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, np.ndarray | np.generic | list | tuple | int | float):
        return jnp.asarray(x)
    raise ValueError(f"{op}: {name} must be an array, got {type(x).__name__}.")


def known_values(x: object) -> np.ndarray | None:
    """The values of an argument where they may be looked at: never under a trace or on a device."""
    return concrete_value(x if isinstance(x, jax.Array) else np.asarray(x))


def cumulative_lengths(op: str, name: str, cum: object, tokens: int) -> jax.Array:
    """Where packed sequences begin, [0, l1, l1 + l2, ...], the last within the tokens."""
    values, ends = known_values(cum), as_array(op, name, cum)
    if ends.ndim != 1 or ends.shape[0] < 2 or not jnp.issubdtype(ends.dtype, jnp.integer):
        raise ValueError(
            f"{op}: {name} must be integers [0, l1, l1 + l2, ...], "
            f"got {ends.dtype}{list(ends.shape)}."
        )
    if values is not None:
        if values[0] != 0 or (np.diff(values) < 0).any():
            raise ValueError(f"{op}: {name} must start at 0 and never decrease, got {values}.")
        if values[-1] > tokens:
            raise ValueError(f"{op}: {name} ends at {values[-1]}, past the {tokens} tokens.")
    return ends


def check_positive_ints(config: Config, *names: str) -> None:
    """Refuse a configuration in which one of these fields is not a positive int."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{type(config).__name__}: {name} must be a positive int, got {value!r}."
            )


def as_specs(specs: Specs | list[PartitionSpec | None]) -> Specs:
    """Partition specs as they are handed on: a list becomes a tuple."""
    return tuple(specs) if isinstance(specs, list) else specs


def window_pair(op: str, window: object) -> tuple[int, int] | None:
    """A window as (left, right); an int is both."""
    if window is None:
        return None
    try:
        left, right = window if isinstance(window, tuple | list) else (window, window)
        left, right = operator.index(left), operator.index(right)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise ValueError(
            f"{op}: sliding_window must be an int or a pair (left, right) of ints, got {window!r}."
        ) from None
    if left < 0 or right < 0:
        raise ValueError(f"{op}: sliding_window must not be negative, got {window!r}.")
    return left, right


def static_number(op: str, name: str, x: object) -> float:
    """A float that is known while tracing."""
    try:
        return float(x)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise ValueError(f"{op}: {name} must be a number known at trace time, got {x!r}.") from None


def check_attention_shapes(op: str, query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Query [b, t, n, h], key [b, s, k, h], value [b, s, k, v], n a multiple of k, one dtype."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(
                f"{op}: {name} must have shape [batch, length, heads, head_dim], got {x.shape}."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{op}: {name} must be floating point, got {x.dtype}.")
        if x.dtype != query.dtype:
            raise ValueError(
                f"{op}: query, key and value must have one dtype, got "
                f"{query.dtype}, {key.dtype} and {value.dtype}."
            )
    batch, _, heads, head_dim = query.shape
    if key.shape[0] != batch or value.shape[0] != batch:
        raise ValueError(
            f"{op}: query, key and value must have one batch size, got "
            f"{batch}, {key.shape[0]} and {value.shape[0]}."
        )
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(
            f"{op}: key and value must agree in length and heads, got {key.shape}, {value.shape}."
        )
    if key.shape[3] != head_dim:
        raise ValueError(
            f"{op}: query and key must have one head dim, got {head_dim} and {key.shape[3]}."
        )
    if key.shape[2] == 0 or heads % key.shape[2]:
        raise ValueError(
            f"{op}: query heads must be a multiple of key heads, got {heads} and {key.shape[2]}."
        )
    if head_dim == 0:
        raise ValueError(f"{op}: the head dim must be positive, got {query.shape}.")
