"""How the arrays of a mask lie on a mesh."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

AxisName = str | tuple[str, ...] | None


class MaskSharding(NamedTuple):
    """A sharding for each representation of a mask; None where there is none to give."""

    attention_mask: NamedSharding | None = None
    q_segment_ids: NamedSharding | None = None
    kv_segment_ids: NamedSharding | None = None
    cu_seqlens_q: NamedSharding | None = None
    cu_seqlens_kv: NamedSharding | None = None
    q_positions: NamedSharding | None = None
    kv_positions: NamedSharding | None = None


def fitted_sharding(mesh: Any, shape: tuple[int, ...], axes: tuple[AxisName, ...]) -> NamedSharding:
    """The sharding of `shape` by `axes`, without the axes that the mesh lacks.

    An axis whose devices do not divide its dimension is left out too.
    """
    entries = [_fitted_axis(mesh.shape, size, axis) for size, axis in zip(shape, axes, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*entries))


def _fitted_axis(devices: Mapping[str, int], size: int, axis: AxisName) -> AxisName:
    names = (axis,) if isinstance(axis, str) else axis or ()
    present = tuple(name for name in names if name in devices)
    if not present or size % math.prod(devices[name] for name in present):
        return None
    return present[0] if len(present) == 1 else present
