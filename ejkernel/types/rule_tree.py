"""How a dataclass becomes a pytree: arrays are children, numbers, strings and None are static.

Rebuilding never validates, because JAX puts placeholders, specs and None where arrays stood.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.tree_util import GetAttrKey

STATIC_TYPES = (type(None), bool, int, str)


def register(cls: type) -> None:
    """Make `cls`, a dataclass or about to become one, a pytree."""
    jax.tree_util.register_pytree_with_keys(
        cls, _flatten_with_keys, functools.partial(_unflatten, cls), _flatten
    )


def is_array(value: Any) -> bool:
    """Whether a field holds an array rather than a static number, a string or None."""
    return not isinstance(value, STATIC_TYPES)


@functools.cache
def field_names(cls: type) -> tuple[str, ...]:
    """Names of the fields of a dataclass."""
    return tuple(field.name for field in dataclasses.fields(cls))


@functools.cache
def full_rank(cls: type, name: str) -> int:
    """Rank of an array field when its batch axis is there: the longest its annotation has."""
    annotation: Any = next(f.type for f in dataclasses.fields(cls) if f.name == name)
    members = getattr(annotation, "__args__", (annotation,))
    return max(len(m.dim_str.split()) for m in members if hasattr(m, "dim_str"))


def arrays_of(rule: Any) -> list[tuple[str, jax.Array]]:
    """Name and value of each field that holds an array."""
    return [(name, getattr(rule, name)) for name in _children(rule)]


def _children(rule: Any) -> tuple[str, ...]:
    """Names of the fields that are children of the pytree.

    Remembered when a rule is rebuilt: then anything may stand where an array stood, an int too.
    """
    remembered = rule.__dict__.get("_array_names")
    if remembered is not None:
        return remembered
    names = tuple(n for n in field_names(type(rule)) if is_array(getattr(rule, n)))
    rule.__dict__["_array_names"] = names
    return names


def _static(rule: Any, names: tuple[str, ...]) -> tuple:
    values = rule.__dict__
    return tuple((n, values[n]) for n in field_names(type(rule)) if n not in names)


def _flatten(rule: Any):
    names = _children(rule)
    return tuple(rule.__dict__[n] for n in names), (names, _static(rule, names))


def _flatten_with_keys(rule: Any):
    names = _children(rule)
    keyed = tuple((GetAttrKey(n), rule.__dict__[n]) for n in names)
    return keyed, (names, _static(rule, names))


def _unflatten(cls: type, static: tuple, children: Any) -> Any:
    names, values = static
    rule = object.__new__(cls)
    rule.__dict__.update(values)
    rule.__dict__.update(zip(names, children, strict=True))
    rule.__dict__["_array_names"] = names
    return rule


def changed(rule: Any, changes: dict[str, Any]) -> Any:
    """A copy of `rule` with other field values and no validation."""
    copy = object.__new__(type(rule))
    for name in field_names(type(rule)):
        copy.__dict__[name] = changes[name] if name in changes else rule.__dict__[name]
    return copy


def summary(value: Any) -> str:
    """Dtype and shape of an array, such as `int32[2,8]`; anything else as it prints."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return repr(value)
