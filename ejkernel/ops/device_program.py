"""What one device runs where the devices of a mesh axis compute a call together."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True)
class DeviceProgram:
    """`program(run, inputs)`: the outputs of a device, inside a `shard_map` over `axis_name`.

    `inputs` are its share of the arrays, and `run` is the op on one device. What it does before and
    after `run` may use collectives, and is differentiated by JAX. A program is part of the key of a
    compiled call: it is frozen, and holds static values only.

    Attributes:
        letters: the axis letters of `Inputs` that are split over the mesh axis.
        replicated: fields of `Inputs` that every device has whole along these letters.
    """

    letters: ClassVar[frozenset[str]] = frozenset()
    replicated: ClassVar[frozenset[str]] = frozenset()

    axis_name: str

    def __call__(self, run: Callable[[Any], Any], inputs: Any) -> Any:
        """The outputs of this device."""
        raise NotImplementedError
