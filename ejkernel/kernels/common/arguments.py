"""Checks that the attention operations share: one sentence for each mistake."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ejkernel.ops.config import Config, check_size
from ejkernel.types.arguments import host_integers, int_or_traced, to_int32
from ejkernel.xla_utils.concrete import concrete_value

# The dtypes of queries, keys and values; a page cache may have others.
FLOATING_DTYPES = tuple(
    map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)),
)

# Of one array, of several, or left to be chosen.
Specs = PartitionSpec | tuple[PartitionSpec | None, ...] | None


def as_array(op: str, name: str, x: object) -> jax.Array:
    """A JAX array from a JAX or NumPy array, or from nested lists of numbers."""
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, np.ndarray | np.generic | list | tuple | int | float):
        raise ValueError(f"{op}: {name} must be an array, got {type(x).__name__}.")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        kind = f"an array of {x.dtype}" if isinstance(x, np.ndarray | np.generic) else "a list"
        raise ValueError(
            f"{op}: {name} must be an array of numbers, got {kind} that JAX cannot represent."
        ) from None


def integer_array(op: str, name: str, x: object) -> jax.Array:
    """`as_array`, with integers as int32, clipped to its range.

    JAX compares narrower integers in their own dtype, and wraps wider ones.
    """
    host = host_integers(x)
    return to_int32(as_array(op, name, x if host is None else to_int32(host)))


def known_values(x: object) -> np.ndarray | None:
    """The values of an argument where they may be looked at: never under a trace or on a device.

    None for what is no array as well: `as_array` says so.
    """
    if isinstance(x, jax.Array):
        return concrete_value(x)
    try:
        values = np.asarray(x)
    except ValueError:
        return None
    return concrete_value(values) if values.dtype.kind in "biufV" else None


def cumulative_lengths(op: str, name: str, cum: object, tokens: int) -> jax.Array:
    """Where packed sequences begin, [0, l1, l1 + l2, ...], the last within the tokens."""
    values, ends = known_values(cum), integer_array(op, name, cum)
    if ends.ndim != 1 or ends.shape[0] < 2 or not jnp.issubdtype(ends.dtype, jnp.integer):
        raise ValueError(
            f"{op}: {name} must be integers [0, l1, l1 + l2, ...], "
            f"got {ends.dtype}{list(ends.shape)}."
        )
    if values is not None:
        if values[0] != 0 or (values[1:] < values[:-1]).any():
            raise ValueError(f"{op}: {name} must start at 0 and never decrease, got {values}.")
        if values[-1] > tokens:
            raise ValueError(f"{op}: {name} ends at {values[-1]}, past the {tokens} tokens.")
    return ends


def check_positive_ints(config: Config, *names: str) -> None:
    """Refuse a configuration in which one of these fields is not a positive int."""
    for name in names:
        check_size(config, name)


def as_specs(specs: Specs | list[PartitionSpec | None]) -> Specs:
    """Partition specs as they are handed on: a list becomes a tuple."""
    return tuple(specs) if isinstance(specs, list) else specs


def window_length(op: str, window: object) -> tuple[int | None, jax.Array | None]:
    """How many of the newest keys a query sees: `(static, None)`, or `(None, [1])` if traced."""
    if window is None:
        return None, None
    length = int_or_traced(window)
    if length is None:
        raise ValueError(f"{op}: sliding_window must be an int, got {window!r}.")
    if not isinstance(length, int):
        return None, length.reshape(1)
    if length < 1:
        raise ValueError(f"{op}: sliding_window must be positive, got {length}.")
    return length, None


def check_floating(op: str, name: str, dtype: DTypeLike) -> None:
    """Refuse an argument that is not in one of the floating-point dtypes of the operations."""
    if jnp.dtype(dtype) not in FLOATING_DTYPES:
        *first, last = map(str, FLOATING_DTYPES)
        raise ValueError(
            f"{op}: {name} must be floating point, {', '.join(first)} or {last}, got "
            f"{jnp.dtype(dtype)}."
        )


def static_number(op: str, name: str, x: object) -> float:
    """A float that is known while tracing."""
    try:
        if isinstance(x, str | bytes):  # `float` would read it
            raise TypeError
        return float(x)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise ValueError(f"{op}: {name} must be a number known at trace time, got {x!r}.") from None
    except OverflowError:
        raise ValueError(f"{op}: {name} must be a number that a float can hold.") from None


class BatchedArrays(NamedTuple):
    """Query, key and value with a batch axis; `added` where the caller's had none."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    added: bool


def with_batch_axis(op: str, query: object, key: object, value: object) -> BatchedArrays:
    """The arrays of a call [batch, length, heads, head_dim], or without batch, as arrays with one.

    Raises:
        ValueError: if some of them have a batch axis and some have none, or a rank is another.
    """
    given = {"query": query, "key": key, "value": value}
    arrays = {name: as_array(op, name, x) for name, x in given.items()}
    for name, x in arrays.items():
        if x.ndim not in (3, 4):
            raise ValueError(
                f"{op}: {name} must have shape [batch, length, heads, head_dim] or, without a "
                f"batch, [length, heads, head_dim], got {x.shape}."
            )
    shapes = [x.shape for x in arrays.values()]
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(
            f"{op}: query, key and value must all have a batch axis or all have none, got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}."
        )
    if len(shapes[0]) == 4:
        return BatchedArrays(**arrays, added=False)
    return BatchedArrays(
        **{name: jax.lax.expand_dims(x, (0,)) for name, x in arrays.items()}, added=True
    )


def specs_with_batch_axis(specs: Any) -> Any:
    """The specs of arrays without a batch axis, for arrays that have one."""
    if isinstance(specs, PartitionSpec):
        return PartitionSpec(None, *specs)
    if isinstance(specs, tuple | list):
        return tuple(map(specs_with_batch_axis, specs))
    return specs


def check_attention_shapes(op: str, query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Query [b, t, n, h], key [b, s, k, h], value [b, s, k, v], n a multiple of k, one dtype."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(
                f"{op}: {name} must have shape [batch, length, heads, head_dim], got {x.shape}."
            )
        check_floating(op, name, x.dtype)
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
