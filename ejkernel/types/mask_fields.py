"""The fields of a `MaskInfo` as a pytree, copies with other values, and its cache of results."""

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp

from ejkernel.types.arguments import concrete

if TYPE_CHECKING:
    from ejkernel.types.mask import MaskInfo

    Mask = TypeVar("Mask", bound=MaskInfo)
else:
    # The checker that tests run cannot look up a class whose file imports this one.
    Mask = TypeVar("Mask")

_Result = TypeVar("_Result")

_CHILDREN = ("rule", "q_positions", "kv_positions", "ids_rule", "q_ids", "kv_ids")
_STATIC = (
    "q_len",
    "kv_len",
    "mask_dtype",
    "batch_axis_name",
    "qheads_axis_name",
    "kvheads_axis_name",
    "sequence_axis_name",
)


def register(cls: type) -> None:
    """Make `MaskInfo`, or a subclass of it, a pytree."""
    unflatten = functools.partial(_unflatten, cls)
    jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, unflatten, _flatten)


def changed(mask: Mask, **changes: object) -> Mask:
    """A copy of `mask` with other field values; nothing cached is carried over."""
    values = {name: getattr(mask, name) for name in (*_CHILDREN, *_STATIC)} | changes
    return _unflatten(
        type(mask), [values[name] for name in _STATIC], [values[name] for name in _CHILDREN]
    )


def cached(mask: "MaskInfo", key: Hashable, compute: Callable[[], _Result]) -> _Result:
    """`compute()`, once; what was computed under a trace belongs to it and is not kept."""
    cache = mask.__dict__.setdefault("_cache", {})
    if key in cache:
        return cache[key]
    with jax.numpy_rank_promotion("allow"):
        value = compute()
    if concrete(value):
        cache[key] = value
    return value


def batch_size(mask: "MaskInfo") -> int | None:
    """Number of batch rows of the arrays; None where none of them has a batch axis."""
    sizes = [rule.batch_size for rule in (mask.rule, mask.ids_rule) if rule is not None]
    arrays = (mask.q_ids, mask.kv_ids, mask.q_positions, mask.kv_positions)
    sizes += [array.shape[0] for array in arrays if array is not None and array.ndim == 2]
    return max((size for size in sizes if size is not None), default=None)


def with_batch(mask: Mask, size: int) -> Mask:
    """`mask`, whose batch is 1, with every batch axis repeated to `size`."""
    grow = lambda array: None if array is None else jnp.broadcast_to(array, (size, array.shape[1]))
    return changed(
        mask,
        rule=mask.rule.with_batch(size),
        ids_rule=None if mask.ids_rule is None else mask.ids_rule.with_batch(size),
        q_positions=grow(mask.q_positions),
        kv_positions=grow(mask.kv_positions),
        q_ids=grow(mask.q_ids),
        kv_ids=grow(mask.kv_ids),
    )


def _unflatten(cls: type[Mask], static: Iterable[object], children: Iterable[object]) -> Mask:
    # No `__init__`: JAX may put anything where the arrays stood.
    mask = object.__new__(cls)
    mask.__dict__.update(zip(_STATIC, static, strict=True))
    mask.__dict__.update(zip(_CHILDREN, children, strict=True))
    return mask


def _flatten(mask: "MaskInfo") -> tuple[tuple, tuple]:
    values = mask.__dict__
    return tuple(values[name] for name in _CHILDREN), tuple(values[name] for name in _STATIC)


def _flatten_with_keys(mask: "MaskInfo") -> tuple[tuple, tuple]:
    children, static = _flatten(mask)
    keys = map(jax.tree_util.GetAttrKey, _CHILDREN)
    return tuple(zip(keys, children, strict=True)), static
