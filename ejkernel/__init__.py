"""Attention and related operations for JAX, with one meaning on CPU, GPU and TPU.

Importing the package loads nothing: every name below is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel import errors as errors
    from ejkernel import integrations as integrations
    from ejkernel import modules as modules
    from ejkernel import ops as ops
    from ejkernel import parallel as parallel
    from ejkernel import settings as settings
    from ejkernel import types as types
    from ejkernel.integrations.jax_nn import dot_product_attention as dot_product_attention
    from ejkernel.modules import blocksparse_attention as blocksparse_attention
    from ejkernel.modules import flash_attention as flash_attention
    from ejkernel.modules import gla_attention as gla_attention
    from ejkernel.modules import grouped_matmul as grouped_matmul
    from ejkernel.modules import lightning_attention as lightning_attention
    from ejkernel.modules import mean_pooling as mean_pooling
    from ejkernel.modules import native_sparse_attention as native_sparse_attention
    from ejkernel.modules import page_attention as page_attention
    from ejkernel.modules import ragged_page_attention_v2 as ragged_page_attention_v2
    from ejkernel.modules import ragged_page_attention_v3 as ragged_page_attention_v3
    from ejkernel.modules import ragged_page_attention_v3_update as ragged_page_attention_v3_update
    from ejkernel.modules import recurrent_attention as recurrent_attention
    from ejkernel.modules import ring_attention as ring_attention
    from ejkernel.modules import scaled_dot_product_attention as scaled_dot_product_attention
    from ejkernel.ops.autotuning import autotune as autotune
    from ejkernel.ops.platform import Backend as Backend
    from ejkernel.ops.platform import Platform as Platform
    from ejkernel.ops.registry import kernel_registry as kernel_registry
    from ejkernel.types.mask import MaskInfo as MaskInfo

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "MaskInfo",
    "Platform",
    "__version__",
    "autotune",
    "blocksparse_attention",
    "dot_product_attention",
    "errors",
    "flash_attention",
    "gla_attention",
    "grouped_matmul",
    "integrations",
    "kernel_registry",
    "lightning_attention",
    "mean_pooling",
    "modules",
    "native_sparse_attention",
    "ops",
    "page_attention",
    "parallel",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "ragged_page_attention_v3_update",
    "recurrent_attention",
    "ring_attention",
    "scaled_dot_product_attention",
    "settings",
    "types",
]

_MODULES = frozenset({"errors", "integrations", "modules", "ops", "parallel", "settings", "types"})
_HOMES = {  # of the names that are not operations
    "Backend": "ejkernel.ops",
    "MaskInfo": "ejkernel.types",
    "Platform": "ejkernel.ops",
    "autotune": "ejkernel.ops",
    "dot_product_attention": "ejkernel.integrations.jax_nn",
    "kernel_registry": "ejkernel.ops",
}


def __getattr__(name: str) -> Any:
    """A name of the package, imported on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'ejkernel' has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(f"ejkernel.{name}")
    if name == "kernel_registry":
        importlib.import_module("ejkernel.kernels")  # puts our ops into the table
    value = getattr(importlib.import_module(_HOMES.get(name, "ejkernel.modules")), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
