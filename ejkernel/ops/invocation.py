"""One call, as the configuration chain sees it: what identifies it, what it is measured with."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import jax

from ejkernel import settings
from ejkernel.ops import axes, keys
from ejkernel.ops.implementation import CallInputs, CallSpec, Direction, Op
from ejkernel.ops.platform import Device

Key = tuple[str, str, str]


@runtime_checkable
class Described(Protocol):
    """A part of a call that says itself what of it belongs to the key: a mask, a user's call."""

    def describe(self) -> object:
        """Values that JSON can hold."""
        ...


@runtime_checkable
class Rebuildable(Protocol):
    """The static part of a user's call, which knows its arguments."""

    def rebuild(self, arrays: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The args and kwargs of the call with these arrays."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Invocation:
    """A call of `op`: its arrays (concrete, traced or abstract), its static arguments, its device.

    `args` and `kwargs` are the call as a `Kernel` received it; for our own ops they are the
    canonical `inputs` and `spec`.
    """

    op: Op
    inputs: CallInputs
    spec: CallSpec
    device: Device
    platform: str | None = None
    direction: Direction = "forward"
    saved: tuple[Any, Any] | None = None  # for a backward: residuals and d_outputs

    @property
    def op_id(self) -> str:
        """The name of the op."""
        return self.op.name

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of the call."""
        return self._call[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        return self._call[1]

    @property
    def _call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self.spec, Rebuildable):
            return self.spec.rebuild(self.inputs)
        return (self.inputs, self.spec), {}

    @functools.cached_property
    def call_key(self) -> str:
        """Hash of all that a configuration may depend on; never of the values of arrays."""
        leaves, letters = jax.tree.leaves(self.inputs), axes.of_leaves(self.inputs)
        arrays = [
            (str(x.dtype), *self._sizes(x.shape, letter))
            for x, letter in zip(leaves, letters, strict=True)
        ]
        structure = [
            value.describe() if isinstance(value, Described) else value is not None
            for name, value in zip(self._names(), self.inputs, strict=True)
            if value is not None or name not in self.op.later_inputs
        ]
        spec = self.spec.describe() if isinstance(self.spec, Described) else self.spec
        deterministic = ["deterministic"] if settings.deterministic() else []
        return keys.short_hash([arrays, structure, spec, self.platform or "auto", *deterministic])

    def _names(self) -> tuple[str, ...]:
        """The names of the inputs; of a user's kernel their numbers."""
        return getattr(self.inputs, "_fields", tuple(map(str, range(len(self.inputs)))))

    def _sizes(self, shape: tuple[int, ...], letters: tuple[str, ...] | None) -> list[int]:
        """Shape with the sizes that do not matter for tuning rounded up to a power of two."""
        return [
            keys.bucket(size) if letter.removeprefix("#") in self.op.bucketed else size
            for size, letter in zip(shape, letters or ("",) * len(shape), strict=True)
        ]

    @functools.cached_property
    def key(self) -> Key:
        """(device, op and version, call): where caches and overlays look this call up."""
        return (self.device.fingerprint, self.op.identifier(self.direction), self.call_key)

    def abstract(self) -> "Invocation":
        """The same call with shapes in place of arrays, safe to keep."""
        return dataclasses.replace(
            self,
            inputs=keys.abstractify(self.inputs),
            saved=keys.abstractify(self.saved),
        )
