"""How a dataclass becomes a pytree: arrays are children, numbers, strings and None are static.

Rebuilding never validates, because JAX puts placeholders, specs and None where arrays stood.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, TypeGuard, TypeVar

import jax
from jax.tree_util import GetAttrKey

STATIC_TYPES = (type(None), bool, int, str)

# Names of the children of a pytree; names and values of its static fields.
Structure = tuple[tuple[str, ...], tuple[tuple[str, object], ...]]

_Object = TypeVar("_Object")


def register(cls: type) -> None:
    """Make `cls`, a dataclass or about to become one, a pytree."""
    jax.tree_util.register_pytree_with_keys(
        cls, _flatten_with_keys, functools.partial(_unflatten, cls), _flatten
    )


def is_array(value: object) -> TypeGuard[jax.Array]:
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


def arrays_of(rule: object) -> list[tuple[str, Any]]:
    """Name and value of each field that holds an array."""
    return [(name, rule.__dict__[name]) for name in _structure(rule)[0]]


def _structure(rule: object) -> Structure:
    """Names of the fields that are children of the pytree, and the others with their values.

    Remembered when a rule is rebuilt: then anything may stand where an array stood, an int too.
    """
    values = rule.__dict__
    remembered = values.get("_structure")
    if remembered is None:
        names = field_names(type(rule))
        children = tuple(name for name in names if is_array(values[name]))
        static = tuple((name, values[name]) for name in names if name not in children)
        remembered = values["_structure"] = (children, static)
    return remembered


def _flatten(rule: object) -> tuple[tuple[object, ...], Structure]:
    structure = _structure(rule)
    values = rule.__dict__
    return tuple([values[name] for name in structure[0]]), structure


def _flatten_with_keys(
    rule: object,
) -> tuple[tuple[tuple[GetAttrKey, object], ...], Structure]:
    children, structure = _flatten(rule)
    return tuple(zip(map(GetAttrKey, structure[0]), children, strict=True)), structure


def _unflatten(cls: type[_Object], structure: Structure, children: Iterable[object]) -> _Object:
    names, static = structure
    rule = object.__new__(cls)
    values = rule.__dict__
    values.update(static)
    values.update(zip(names, children, strict=True))
    values["_structure"] = structure
    return rule


def changed(rule: _Object, changes: dict[str, object]) -> _Object:
    """A copy of `rule` with other field values and no validation."""
    copy = object.__new__(type(rule))
    for name in field_names(type(rule)):
        copy.__dict__[name] = changes[name] if name in changes else rule.__dict__[name]
    return copy


def summary(value: object) -> str:
    """Dtype and shape of an array, such as `int32[2,8]`; anything else as it prints."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{dtype}[{','.join(map(str, shape))}]"
    return repr(value)
