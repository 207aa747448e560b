"""Checks that the operations over pages share, and the one form their arguments take."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import (
    FLOATING_DTYPES,
    as_array,
    check_floating,
    integer_array,
    known_values,
    static_number,
    window_length,
)
from ejkernel.kernels.common.attention import bound_of_logits, scale_of_logits
from ejkernel.kernels.common.paged import LAYOUTS
from ejkernel.types.arguments import to_int32

_EIGHT_BITS = map(np.dtype, (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2))
_CACHE_DTYPES = (*FLOATING_DTYPES, *_EIGHT_BITS)


# Indices and lengths: NumPy where their values are at hand, so that nothing runs yet.
Integers = jax.Array | np.ndarray


class Options(NamedTuple):
    """What every operation over pages takes by keyword, as the caller gave it."""

    softmax_aux: ArrayLike | None
    softmax_scale: float | None
    sliding_window: ArrayLike | None
    logits_soft_cap: float | None
    kv_layout: str
    k_scale: ArrayLike | None
    v_scale: ArrayLike | None


class Cache(NamedTuple):
    """The arrays of a KV cache, checked; `keys` alone where it is combined.

    `names` are those that the caller knows them by.
    """

    names: tuple[str, ...]
    keys: jax.Array
    values: jax.Array | None
    pages: int
    page_size: int
    kv_heads: int
    value_dim: int

    @property
    def separate_values(self) -> jax.Array:
        """The values of a cache that is not combined."""
        if self.values is None:
            raise ValueError("keys and values of this cache share one array.")
        return self.values


class Sequences(NamedTuple):
    """Where each sequence's queries and pages are: [b, s], and [b, s, pages] for the table.

    Each is `Integers`; to the kernels, which get them under jit, arrays of JAX.
    """

    query_starts: Any
    query_lens: Any
    kv_lens: Any
    page_indices: Any


def check_query(op: str, query: jax.Array, ranks: tuple[int, ...], shape: str) -> None:
    """A query of one of these ranks, in floating point."""
    if query.ndim not in ranks:
        raise ValueError(f"{op}: query must have shape {shape}, got {query.shape}.")
    check_floating(op, "query", query.dtype)


def cache(
    op: str, query: jax.Array, layout: str, arrays: dict[str, ArrayLike], combined: bool = False
) -> Cache:
    """The cache in the layout that was named, fitting the query."""
    if layout not in LAYOUTS:
        raise ValueError(f"{op}: kv_layout must be one of {', '.join(LAYOUTS)}, got {layout!r}.")
    found = {name: as_array(op, name, x) for name, x in arrays.items()}
    names = {"p": "pages", "c": "page_size", "k": "kv_heads", "h": "head_dim"}
    axes = LAYOUTS[layout]
    for name, x in found.items():
        if x.ndim != 4:
            shape = ", ".join(names[letter] for letter in axes)
            shape = shape.replace("kv_heads", "2 * kv_heads") if combined else shape
            raise ValueError(f"{op}: {name} must have shape [{shape}], got {x.shape}.")
        if x.dtype not in _CACHE_DTYPES:
            known = ", ".join(map(str, _CACHE_DTYPES))
            raise ValueError(f"{op}: {name} must be one of {known}, got {x.dtype}.")
    first, *rest = found
    keys = found[first]
    sizes = dict(zip(axes, keys.shape, strict=True))
    for name in rest:
        values = found[name]
        if values.shape[:-1] != keys.shape[:-1] or values.dtype != keys.dtype:
            raise ValueError(
                f"{op}: {first} and {name} must agree in all but the head dim, got "
                f"{keys.dtype}{list(keys.shape)} and {values.dtype}{list(values.shape)}."
            )
    heads, head_dim = query.shape[-2:]
    hint = _other_layouts(layout, keys.shape, heads, combined)
    if combined:
        if sizes["k"] % 2:
            raise ValueError(
                f"{op}: {first} holds key heads and value heads alternately and must have an even "
                f"number of heads, got {sizes['k']}{hint}."
            )
        sizes["k"] //= 2
        shape = list(keys.shape)
        where = axes.index("k")
        keys = keys.reshape(*shape[:where], sizes["k"], 2, *shape[where + 1 :])
    if sizes["h"] != head_dim:
        raise ValueError(
            f"{op}: query and {first} must have one head dim, got {head_dim} and {sizes['h']}."
        )
    if sizes["k"] == 0 or heads % sizes["k"]:
        raise ValueError(
            f"{op}: query heads must be a multiple of key heads, got {heads} and "
            f"{sizes['k']}{hint}."
        )
    values = found[rest[0]] if rest else None
    value_dim = head_dim if values is None else values.shape[-1]
    return Cache(tuple(found), keys, values, sizes["p"], sizes["c"], sizes["k"], value_dim)


def _other_layouts(layout: str, shape: tuple[int, ...], heads: int, combined: bool) -> str:
    """How an error about the heads of a cache ends: layouts in which its shape would fit."""
    per_head = 2 if combined else 1
    fitting = []
    for other, axes in LAYOUTS.items():
        kv_heads, rest = divmod(shape[axes.index("k")], per_head)
        if other != layout and kv_heads and not rest and heads % kv_heads == 0:
            fitting.append(f'kv_layout="{other}"')
    if not fitting:
        return ""
    return f' under kv_layout="{layout}"; the shape {list(shape)} fits {" or ".join(fitting)}'


def integers(op: str, name: str, x: object, shape: str, ranks: tuple[int, ...]) -> Integers:
    """Indices or lengths as int32."""
    known = known_values(x) if isinstance(x, jax.Array | np.ndarray | list | tuple | int) else None
    array = integer_array(op, name, x) if known is None else to_int32(known)
    if array.ndim not in ranks or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{op}: {name} must be integers {shape}, got {array.dtype}{list(array.shape)}."
        )
    return array


def cumulative(op: str, name: str, x: object, count: int | None, most: int | None) -> Integers:
    """Cumulative lengths [0, l1, l1 + l2, ...] of `count` sequences, up to `most`."""
    ends = integers(op, name, x, "[sequences + 1]", (1,))
    if ends.shape[0] < 1 or (count is not None and ends.shape[0] != count + 1):
        wanted = "at least one entry" if count is None else f"{count + 1} entries"
        raise ValueError(f"{op}: {name} must have {wanted}, got {ends.shape[0]}.")
    if isinstance(ends, np.ndarray):
        if ends[0] != 0 or (np.diff(ends) < 0).any():
            raise ValueError(f"{op}: {name} must begin with 0 and never decrease, got {ends}.")
        if most is not None and ends[-1] > most:
            raise ValueError(f"{op}: {name} ends at {ends[-1]}, beyond the {most} rows of query.")
    return ends


def check_sequences(
    op: str, sequences: Sequences, cache: Cache, window: int | None, names: tuple[str, str]
) -> None:
    """Lengths within the table, and page ids within the cache where a query may look.

    `names` are those of the lengths and of the table. What is traced or on a device is not checked.
    """
    _, lens, kv_lens, table = sequences
    lengths_name, table_name = names
    if not isinstance(kv_lens, np.ndarray):
        return
    if (kv_lens < 0).any():
        raise ValueError(f"{op}: {lengths_name} must not be negative, got {kv_lens.min()}.")
    capacity = table.shape[-1] * cache.page_size
    if (kv_lens > capacity).any():
        raise ValueError(
            f"{op}: {lengths_name} must be at most {capacity}, {table.shape[-1]} pages of "
            f"{cache.page_size}, got {kv_lens.max()}."
        )
    if not isinstance(table, np.ndarray) or not isinstance(lens, np.ndarray):
        return
    page = np.arange(table.shape[-1])
    used = (page < -(-kv_lens // cache.page_size)[..., None]) & (lens > 0)[..., None]
    if window is not None:
        oldest = np.maximum(kv_lens - lens - window + 1, 0)
        used &= page >= (oldest // cache.page_size)[..., None]
    wrong = table[used & ((table < -1) | (table >= cache.pages))]
    if wrong.size:
        raise ValueError(
            f"{op}: {table_name} must hold page ids below {cache.pages}, or -1 for no page, "
            f"got {wrong[0]}."
        )


def scale(op: str, name: str, x: ArrayLike | None, kv_heads: int) -> jax.Array | None:
    """One scale for each key head."""
    if x is None:
        return None
    if isinstance(x, int | float) and not isinstance(x, bool):
        with np.errstate(over="ignore"):
            scales = np.asarray(static_number(op, name, x)).astype(np.float32)
    else:
        scales = as_array(op, name, x)
    check_floating(op, name, scales.dtype)
    if scales.shape not in ((), (1,), (kv_heads,)):
        raise ValueError(
            f"{op}: {name} must be one number or [{kv_heads}], got {list(scales.shape)}."
        )
    if isinstance(scales, np.ndarray):  # a number needs no program
        return jax.device_put(np.full((kv_heads,), scales))
    return jnp.broadcast_to(scales, (kv_heads,))


def traced_window(op: str, options: Options) -> jax.Array | None:
    """The window [1] of a call whose window is not known yet; `statics` has any other."""
    return window_length(op, options.sliding_window)[1]


def statics(op: str, head_dim: int, options: Options) -> dict[str, Any]:
    """The static options by the names that `Spec` has for them."""
    return {
        "softmax_scale": scale_of_logits(op, options.softmax_scale, head_dim),
        "logits_soft_cap": bound_of_logits(op, options.logits_soft_cap),
        "sliding_window": window_length(op, options.sliding_window)[0],
        "kv_layout": options.kv_layout,
    }


def rearranged(spec: Iterable[Any] | None, *positions: int | None) -> PartitionSpec | None:
    """A spec for an array whose axes stand at these positions of the given one, None where new."""
    if spec is None:
        return None
    entries = list(spec)
    at = lambda i: entries[i] if i is not None and i < len(entries) else None
    known = [i for i in positions if i is not None]
    extra = entries[max(known) + 1 :]  # more than the array has axes: left for the check of specs
    return PartitionSpec(*map(at, positions), *extra)


def rearranged_specs(specs: object, *positions: tuple[int | None, ...]) -> Any:
    """The first specs of a call rearranged one by one; the others, and what is no list, stay."""
    if specs is None or isinstance(specs, PartitionSpec) or not isinstance(specs, tuple | list):
        return specs
    first = [rearranged(spec, *order) for spec, order in zip(specs, positions, strict=False)]
    return (*first, *tuple(specs)[len(first) :])
