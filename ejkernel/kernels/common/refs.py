"""Types of what a Pallas kernel is given."""

from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

# A position that may be known when the kernel is traced, or only when it runs.
Index = int | np.integer | jax.Array


@runtime_checkable
class Ref(Protocol):
    """An array in the memory of the device, a view of one, or a barrier: read, written, indexed."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def at(self) -> Any: ...

    def __getitem__(self, index: Any) -> Any: ...

    def __setitem__(self, index: Any, value: Any) -> None: ...
