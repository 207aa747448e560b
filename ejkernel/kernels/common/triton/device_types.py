"""Types of the parameters of Triton device functions, for readers and for a static checker.

Triton passes objects of its own: nothing is ever an instance of `Tensor` or `Pointer`.
Plain compile-time constants are annotated `tl.constexpr`, a dataclass of them by its own type.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from ejkernel.kernels.common.constants import LOG2_E

INT32_ELEMENTS = 2**31  # offsets in larger arrays need 64 bits


class _Annotation:
    """A type that Triton, which looks up all names in the source, accepts in a signature."""

    __triton_builtin__ = True


class StaticArguments(_Annotation):
    """Base of the frozen dataclasses of compile-time constants that kernels take as `static`.

    It has the numbers that device code, which may not read globals, uses.
    """

    log2_e: ClassVar[float] = LOG2_E
    ln_2: ClassVar[float] = math.log(2.0)
    float32_min: ClassVar[float] = float(np.finfo(np.float32).min)


class Tensor(_Annotation):
    """A block of values in registers: `tl.tensor`."""

    shape: tuple[int, ...]
    dtype: Any

    def to(self, dtype: object, *, bitcast: bool = False) -> Any: ...

    def __getitem__(self, index: slice | tuple[slice | None, ...] | None) -> Any: ...

    def __neg__(self) -> Any: ...

    def __add__(self, other: Tensor | float) -> Any: ...

    def __radd__(self, other: Tensor | float) -> Any: ...

    def __sub__(self, other: Tensor | float) -> Any: ...

    def __rsub__(self, other: Tensor | float) -> Any: ...

    def __mul__(self, other: Tensor | float) -> Any: ...

    def __rmul__(self, other: Tensor | float) -> Any: ...

    def __truediv__(self, other: Tensor | float) -> Any: ...

    def __floordiv__(self, other: Tensor | float) -> Any: ...

    def __mod__(self, other: Tensor | float) -> Any: ...

    def __lshift__(self, other: Tensor | float) -> Any: ...

    def __rshift__(self, other: Tensor | float) -> Any: ...

    def __and__(self, other: Tensor | float) -> Any: ...

    def __or__(self, other: Tensor | float) -> Any: ...

    def __xor__(self, other: Tensor | float) -> Any: ...

    def __lt__(self, other: Tensor | float) -> Any: ...

    def __le__(self, other: Tensor | float) -> Any: ...

    def __gt__(self, other: Tensor | float) -> Any: ...

    def __ge__(self, other: Tensor | float) -> Any: ...


class TensorOrPair(Tensor):
    """A tensor, or a tuple of two."""

    def __getitem__(self, index: int | slice | tuple[slice | None, ...] | None) -> Any: ...


class Scalar(Tensor):
    """One value: `tl.tensor` without axes. It may bound a `range`."""

    def __index__(self) -> int: ...


class Pointer(_Annotation):
    """The address of an array in global memory, or of one of its elements."""

    dtype: Any

    def to(self, dtype: object, *, bitcast: bool = False) -> Any: ...

    def __add__(self, offset: Tensor | int) -> Any: ...
