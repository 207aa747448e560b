"""The memories of a TPU core, and how many bytes an array takes in VMEM."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.kernels.common.integers import round_up
from ejkernel.ops.platform import Device

MEBIBYTE = 1 << 20
VMEM_SHARE = 0.6  # of VMEM and SMEM that a kernel may plan with; the compiler needs the rest


class TpuCore(NamedTuple):
    """The memories of one core, in bytes, and the width of its matrix units (MXU)."""

    vmem: int
    smem: int
    mxu: int


# By the prefix of the device kind; the first match is used.
_CORES = (
    ("TPU v4", TpuCore(16 * MEBIBYTE, MEBIBYTE, 128)),
    ("TPU v5 lite", TpuCore(128 * MEBIBYTE, MEBIBYTE, 128)),
    ("TPU v5e", TpuCore(128 * MEBIBYTE, MEBIBYTE, 128)),
    ("TPU v5", TpuCore(64 * MEBIBYTE, MEBIBYTE, 128)),
    ("TPU v6", TpuCore(128 * MEBIBYTE, MEBIBYTE, 256)),
    ("TPU7", TpuCore(64 * MEBIBYTE, MEBIBYTE, 256)),
)
_SMALLEST = TpuCore(16 * MEBIBYTE, MEBIBYTE, 128)


def core_of(device: Device | None) -> TpuCore:
    """The core of a device; the smallest one for a device that is not known."""
    kind = "" if device is None else device.kind
    return next((core for name, core in _CORES if kind.startswith(name)), _SMALLEST)


def vmem_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """The bytes of an array in VMEM, whose tiles have 128 lanes and 8 rows of 32 bits."""
    size = jnp.dtype(dtype).itemsize
    *outer, rows, lanes = (1, 1, *shape) if len(shape) < 2 else shape
    packed = 8 * max(1, 4 // size)
    return math.prod(outer) * round_up(rows, packed) * round_up(lanes, 128) * size


def vmem_limit(estimate: int) -> int:
    """The bytes of VMEM to request of the compiler for a kernel that takes about `estimate`."""
    return max(16 * MEBIBYTE, int(estimate / VMEM_SHARE * 0.9))
