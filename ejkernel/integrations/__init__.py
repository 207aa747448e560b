"""Attention under the signatures that other libraries expect.

`jax_nn.dot_product_attention` has the signature of `jax.nn.dot_product_attention`,
`flax.attention_fn` is what Flax's attention modules take as `attention_fn=`, and
`equinox.MultiheadAttention` is a drop-in for `equinox.nn.MultiheadAttention`. The last one is the
only module here that imports the library it is for.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ejkernel.integrations import equinox as equinox
    from ejkernel.integrations import flax as flax
    from ejkernel.integrations import jax_nn as jax_nn

__all__ = ["equinox", "flax", "jax_nn"]


def __getattr__(name: str) -> ModuleType:
    """A module of this package, imported on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'ejkernel.integrations' has no attribute {name!r}")
    return importlib.import_module(f"ejkernel.integrations.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
