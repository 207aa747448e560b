"""Attention and related operations for JAX, with one meaning on CPU, GPU and TPU."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel.ops.platform import Backend as Backend
    from ejkernel.ops.platform import Platform as Platform
    from ejkernel.ops.registry import kernel_registry as kernel_registry

__version__ = "0.1.0"

__all__ = ["Backend", "Platform", "__version__", "kernel_registry"]


def __getattr__(name: str) -> Any:
    """`Backend`, `Platform` and `kernel_registry`, loaded when they are asked for."""
    if name not in ("Backend", "Platform", "kernel_registry"):
        raise AttributeError(f"module 'ejkernel' has no attribute {name!r}")
    importlib.import_module("ejkernel.kernels")  # puts our ops into the table
    return getattr(importlib.import_module("ejkernel.ops"), name)
