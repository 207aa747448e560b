"""Keys of a call, the same in every process: shapes, dtypes and static arguments, hashed."""

import dataclasses
import enum
import hashlib
import json
import re
from collections.abc import Mapping, Set
from typing import Any, Protocol, TypeGuard

import jax
import numpy as np


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


def describe(value: object) -> Any:
    """The value in terms of JSON, the same in every process; an array is its shape and dtype.

    >>> describe({"x": jax.numpy.zeros((2, 3)), "window": (4, 0), "activation": abs})
    {'x': {'shape': [2, 3], 'dtype': 'float32'}, 'window': [4, 0], 'activation': 'builtins.abs'}
    """
    if isinstance(value, enum.Enum):
        return describe(value.value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {
            name if isinstance(name, str) else stable_json(name): describe(item)
            for name, item in value.items()
        }
    if isinstance(value, Set):
        return sorted((describe(item) for item in value), key=stable_json)
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {type(value).__name__: describe(fields)}
    if _is_array(value):
        return {"shape": list(value.shape), "dtype": str(value.dtype)}
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return without_addresses(repr(value))


def without_addresses(text: str) -> str:
    """The text of a `repr` without addresses, which are others in every process.

    >>> without_addresses("<function silu at 0x7f01>")
    '<function silu>'
    """
    return re.sub(r" at 0x\w+", "", text)


def stable_json(value: object) -> str:
    """One text for equal values, in every process.

    >>> stable_json({"window": (4, 0), "causal": True})
    '{"causal":true,"window":[4,0]}'
    """
    return json.dumps(describe(value), sort_keys=True, separators=(",", ":"))


def short_hash(value: object) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the value's `stable_json`.

    >>> short_hash({"head_dim": 64})
    '8349a54925daeb92'
    """
    return hashlib.sha256(stable_json(value).encode()).hexdigest()[:16]


def abstractify(tree: object) -> Any:
    """The tree with a `jax.ShapeDtypeStruct` for each array; other leaves stay as they are.

    >>> abstractify([jax.numpy.zeros((2, 3)), 0.5])
    [ShapeDtypeStruct(shape=(2, 3), dtype=float32), 0.5]
    """
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if _is_array(leaf) else leaf, tree
    )


def bucket(size: int) -> int:
    """The next power of two: sizes of one bucket share a configuration.

    >>> [bucket(size) for size in (0, 1, 3, 128, 129)]
    [0, 1, 4, 128, 256]
    """
    if size < 0:
        raise ValueError(f"bucket: size must not be negative, got {size}.")
    return 1 << (size - 1).bit_length() if size else 0


def _is_array(value: object) -> TypeGuard[_Shaped]:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)
