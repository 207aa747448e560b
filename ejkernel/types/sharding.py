"""How the arrays of a mask lie on a mesh."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from ejkernel.types.mask import MaskInfo

AxisName = str | tuple[str, ...] | None


class MaskAxes(NamedTuple):
    """The mesh axes of the dimensions of a mask."""

    batch_axis_name: AxisName
    qheads_axis_name: AxisName
    kvheads_axis_name: AxisName
    sequence_axis_name: AxisName


class MaskSharding(NamedTuple):
    """A sharding for each representation of a mask; None where there is none to give."""

    attention_mask: NamedSharding | None = None
    q_segment_ids: NamedSharding | None = None
    kv_segment_ids: NamedSharding | None = None
    cu_seqlens_q: NamedSharding | None = None
    cu_seqlens_kv: NamedSharding | None = None
    q_positions: NamedSharding | None = None
    kv_positions: NamedSharding | None = None


def shardings(mask: "MaskInfo", mesh: Mesh | AbstractMesh, sequence_parallel: bool) -> MaskSharding:
    """How each representation of a mask lies on a mesh; see `MaskInfo.get_shardings`."""
    batch = mask.batch_size or 1
    sequence = mask.sequence_axis_name if sequence_parallel else None
    tokens = lambda length: _fitted(mesh, (batch, length), (mask.batch_axis_name, sequence))
    return MaskSharding(
        attention_mask=_fitted(
            mesh,
            (batch, mask.rule.heads, mask.q_len, mask.kv_len),
            (mask.batch_axis_name, mask.qheads_axis_name, sequence, None),
        ),
        q_segment_ids=tokens(mask.q_len),
        kv_segment_ids=tokens(mask.kv_len),
        q_positions=None if mask.q_positions is None else tokens(mask.q_len),
        kv_positions=None if mask.kv_positions is None else tokens(mask.kv_len),
    )


def _fitted(
    mesh: Mesh | AbstractMesh, shape: tuple[int, ...], axes: tuple[AxisName, ...]
) -> NamedSharding:
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
