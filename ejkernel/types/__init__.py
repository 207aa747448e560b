"""Masks: `MaskInfo` and the switch of its debug mode."""

from ejkernel.types.debug import get_debug_mode as get_debug_mode
from ejkernel.types.debug import set_debug_mode as set_debug_mode
from ejkernel.types.mask import MaskInfo as MaskInfo

__all__ = ["MaskInfo", "get_debug_mode", "set_debug_mode"]
