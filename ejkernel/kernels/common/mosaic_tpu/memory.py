"""What a TPU core has for a kernel, and how much memory arrays take there."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.ops.platform import Device

MEBIBYTE = 1 << 20


class Core(NamedTuple):
    """The memories of one core, in bytes, and the width of its matrix units."""

    vmem: int
    smem: int
    matrix: int


# By how device kinds begin; the first that fits counts.
_CORES = (
    ("TPU v4", Core(16 * MEBIBYTE, MEBIBYTE, 128)),
    ("TPU v5 lite", Core(128 * MEBIBYTE, MEBIBYTE, 128)),
    ("TPU v5e", Core(128 * MEBIBYTE, MEBIBYTE, 128)),
    ("TPU v5", Core(64 * MEBIBYTE, MEBIBYTE, 128)),
    ("TPU v6", Core(128 * MEBIBYTE, MEBIBYTE, 256)),
    ("TPU7", Core(64 * MEBIBYTE, MEBIBYTE, 256)),
)
_SMALLEST = Core(16 * MEBIBYTE, MEBIBYTE, 128)


def core_of(device: Device | None) -> Core:
    """What a device has; one that is not known, the least there is."""
    kind = "" if device is None else device.kind
    return next((core for name, core in _CORES if kind.startswith(name)), _SMALLEST)


def vmem_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """What an array takes in VMEM, whose tiles have 128 lanes and 8 rows of 32 bits."""
    size = jnp.dtype(dtype).itemsize
    *outer, rows, lanes = (1, 1, *shape) if len(shape) < 2 else shape
    packed = 8 * max(1, 4 // size)
    return math.prod(outer) * _up(rows, packed) * _up(lanes, 128) * size


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
