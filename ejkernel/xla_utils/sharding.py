"""Partition specs made to fit an array and a mesh."""

import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


def get_corrected_named_sharding(
    shape: Sequence[int], spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> NamedSharding:
    """The sharding that a spec asks for, as far as the mesh and the shape allow it.

    Axis names that the mesh lacks are dropped, and a dimension that the remaining axes do not
    divide is not partitioned. The spec is cut or filled with None to the rank of the array; if
    nothing is left to partition, it is empty.

    Args:
        shape: The shape of the array.
        spec: The spec; an entry is None, the name of a mesh axis, or a tuple of names.
        mesh: The mesh.

    Returns:
        A sharding that `jax.device_put` accepts for an array of this shape.

    Example:
        >>> mesh = AbstractMesh((2, 4), ("dp", "tp"))
        >>> spec = PartitionSpec(("dp", "fsdp"), "sp", "tp")
        >>> get_corrected_named_sharding((8, 128, 4), spec, mesh).spec
        P('dp', None, 'tp')
        >>> get_corrected_named_sharding((3, 128, 6), spec, mesh).spec
        P()
    """
    wanted = [*spec, *[None] * len(shape)]
    entries = [_fitted(size, entry, mesh) for size, entry in zip(shape, wanted, strict=False)]
    if all(entry is None for entry in entries):
        entries = []
    return NamedSharding(mesh, PartitionSpec(*entries))


def _fitted(size: int, entry: object, mesh: Mesh | AbstractMesh) -> object:
    """An entry of a spec without the axes that the mesh lacks; None where they do not divide."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    names = entry if isinstance(entry, tuple) else (entry,)
    present = [name for name in names if name in mesh.shape]
    if not present or size % math.prod(mesh.shape[name] for name in present):
        return None
    return tuple(present) if len(present) > 1 else present[0]
