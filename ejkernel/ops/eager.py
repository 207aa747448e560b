"""Eager calls: the public function as one compiled program, found by the shapes of its arguments.

Checking arguments and choosing a configuration in Python takes longer than a small call itself.
None of it depends on the values of arrays of floats with three axes or more, so that a call with no
other arrays is compiled as a whole, once, and looked up from then on.
"""

from collections.abc import Callable, Hashable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ejkernel.ops import executor, recording
from ejkernel.ops.kept import KeptPrograms
from ejkernel.ops.meshes import surrounding_mesh
from ejkernel.ops.platform import default_device, target
from ejkernel.ops.registry import kernel_registry

_STATIC = frozenset({type(None), bool, int, float, str})
_TRACED = "dropout_seed"  # an integer that is an operand of the program, not a part of its key
_LEAST_AXES = 3  # of an array whose values nobody looks at
NOT_COMPILED: Final = object()


class EagerPrograms:
    """The programs of one public function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._programs = KeptPrograms()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of a call; `NOT_COMPILED` if the call cannot be cached by shape."""
        arrays: list[jax.Array] = []
        traced: dict[str, np.ndarray] = {}
        if type(seed := kwargs.get(_TRACED)) is int:
            traced = {_TRACED: np.array(seed & 0xFFFFFFFF, np.uint32).astype(np.int32)}
            kwargs = {name: x for name, x in kwargs.items() if name != _TRACED}
        key: list[Hashable] = [len(args), *kwargs]
        for x in (*args, *kwargs.values()):
            if (part := _described(x, arrays)) is None:
                return NOT_COMPILED
            key.append(part)
        context = _context(arrays)
        if context is None:
            return NOT_COMPILED
        program = self._programs.get(found := (*key, *traced, *context))
        if program is None:
            program = self._compiled(args, kwargs)
            self._programs.put(found, program)
        return program(arrays, traced)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        leaves = [None if _is_concrete(x) else x for x in (*args, *kwargs.values())]
        places = [i for i, x in enumerate((*args, *kwargs.values())) if _is_concrete(x)]
        count, names = len(args), tuple(kwargs)

        @jax.jit
        def program(arrays: list[jax.Array], traced: dict[str, jax.Array]) -> Any:
            merged = list(leaves)
            for place, x in zip(places, arrays, strict=True):
                merged[place] = x
            rest = dict(zip(names, merged[count:], strict=True))
            return self._function(*merged[:count], **rest, **traced)

        return program


def _described(x: object, arrays: list[jax.Array]) -> Hashable | None:
    """What a program depends on of one argument; None where it may depend on its values.

    Arrays are collected in `arrays`.
    """
    if type(x) in _STATIC:
        return None if x != x else (type(x), x)  # a NaN is never found again
    if type(x) is tuple and all(type(y) in _STATIC and y == y for y in x):
        return (tuple, *map(type, x), *x)
    if not _is_concrete(x):
        return None
    array: Any = x
    if array.ndim < _LEAST_AXES or not jnp.issubdtype(array.dtype, jnp.floating):
        return None
    arrays.append(array)
    return (array.shape, array.dtype, array.weak_type)


def _context(arrays: list[jax.Array]) -> tuple[Hashable, ...] | None:
    """What a program depends on besides its arguments; None where it must not be looked up."""
    if not arrays or surrounding_mesh() is not None:
        return None
    device = default_device()
    if any(x.device is not device for x in arrays):
        return None
    current = executor.current_executor()
    if type(current) is not executor.Executor:  # one that does something else with a call
        return None
    if current.chooser.on_event is not None or recording.active():
        return None
    return (current, current.chooser.state(), target(), kernel_registry.registrations)


def _is_concrete(x: object) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)
