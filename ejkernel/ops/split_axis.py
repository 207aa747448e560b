"""What `axis_name=` means: arrays that are split already, or a mesh to split them over.

Inside a `shard_map` over the axis a call is given the shares of its device. Elsewhere its arrays
are whole and are split over the axis of `mesh=`, of `jax.set_mesh` or of a `with mesh:` around the
call; under axes of type `AxisType.Explicit` their types must say so. Without a mesh nothing is
split.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from ejkernel.ops import sharded
from ejkernel.ops.meshes import bound_axis_size, surrounding_mesh


class SplitAxis(NamedTuple):
    """How a call is split over a mesh axis.

    Attributes:
        name: the axis, which is mapped where the devices of the call run; None: nothing is split.
        shards: over how many devices it is split.
        given_shares: whether the arrays are the shares of one device.
        mesh: the mesh for `Request`; None if the axis is mapped already, or is one of the types.
        in_specs: the specs for `Request`.
    """

    name: str | None
    shards: int = 1
    given_shares: bool = False
    mesh: Mesh | AbstractMesh | None = None
    in_specs: Any = None

    def whole(self, length: int) -> int:
        """The length of the whole axis, where the arrays of the call have this length."""
        return length * self.shards if self.given_shares else length


def resolve(
    op: str,
    axis_name: object,
    *,
    arrays: Mapping[str, Any],
    lengths: Mapping[str, int],
    specs: Sequence[PartitionSpec],
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Any = None,
) -> SplitAxis:
    """How the arrays of a call are split over `axis_name`.

    Args:
        op: the name of the operation, for errors.
        axis_name: the mesh axis; None leaves `mesh` and `in_specs` as they are.
        arrays: the operands that `specs` describe, by name, in the order of `in_specs`.
        lengths: what is divided, by its name in the plural: `{"queries": 4096, "keys": 4096}`.
        specs: by default how these operands are split. Where `axis_name` stands in them, it must
            also stand in `in_specs` and in the types of the arrays.
        mesh: the mesh of the call, if it has one.
        in_specs: its specs.

    Raises:
        ValueError: the axis is no axis of the mesh, the specs or types do not split over it, or the
            lengths do not divide.

    >>> import jax.numpy as jnp
    >>> from jax.sharding import AbstractMesh, PartitionSpec as P
    >>> x = jnp.ones((1, 8, 2))
    >>> mesh = AbstractMesh((4,), ("sp",))
    >>> split = resolve(
    ...     "op", "sp", arrays={"x": x}, lengths={"tokens": 8}, specs=[P(None, "sp")], mesh=mesh
    ... )
    >>> split.shards, split.whole(8), split.in_specs == (P(None, "sp"),)
    (4, 8, True)
    """
    if axis_name is None:
        return SplitAxis(None, mesh=mesh, in_specs=in_specs)
    if not isinstance(axis_name, str):
        raise ValueError(f"{op}: axis_name must be a string, got {axis_name!r}.")
    if (size := bound_axis_size(axis_name)) is not None:
        if mesh is not None or in_specs is not None:
            raise ValueError(
                f"{op}: the axis {axis_name!r} is already mapped here; leave mesh= and in_specs= "
                "out."
            )
        return SplitAxis(axis_name, size, given_shares=True)
    types = None
    if mesh is None and in_specs is None:
        mesh, types = _types(arrays)
    elif mesh is None:
        mesh = surrounding_mesh()
    if mesh is None:
        if in_specs is not None:
            raise ValueError(f"{op}: in_specs= needs mesh=, or jax.set_mesh around the call.")
        return SplitAxis(None)
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"{op}: axis_name {axis_name!r} is not an axis of the mesh, which has "
            f"{', '.join(map(str, mesh.axis_names))}."
        )
    size = mesh.shape[axis_name]
    if any(length % size for length in lengths.values()):
        counts = " and ".join(f"{length} {name}" for name, length in lengths.items())
        raise ValueError(
            f"{op}: {counts} do not divide over the {size} devices of {axis_name!r}; pad them to a "
            "multiple."
        )
    if types is not None:
        return _by_types(op, axis_name, arrays, specs, mesh, types)
    if in_specs is None:
        return SplitAxis(axis_name, size, mesh=mesh, in_specs=tuple(specs))
    if isinstance(in_specs, tuple | list) and not isinstance(in_specs, PartitionSpec):
        for name, wanted, spec in zip(arrays, specs, in_specs, strict=False):
            _check(op, name, axis_name, wanted, spec or (), f"got {spec}.")
    return SplitAxis(axis_name, size, mesh=mesh, in_specs=in_specs)


def _types(
    arrays: Mapping[str, Any],
) -> tuple[Mesh | AbstractMesh | None, Sequence[PartitionSpec] | None]:
    """The mesh that the types of arrays name, or that of the context, and how they are split."""
    if found := sharded.from_types(list(arrays.values())):
        return found[0], found[1].specs
    mesh = surrounding_mesh()
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        return mesh, [PartitionSpec()] * len(arrays)
    return mesh, None


def _by_types(
    op: str,
    axis_name: str,
    arrays: Mapping[str, Any],
    specs: Sequence[PartitionSpec],
    mesh: Mesh | AbstractMesh,
    types: Sequence[PartitionSpec],
) -> SplitAxis:
    """The types say how the arrays are split; not over an automatic axis, which no type names."""
    size = mesh.shape[axis_name]
    kind = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis_name]
    if kind != AxisType.Explicit:
        merged = tuple(map(_merged, types, specs))
        return SplitAxis(axis_name, size, mesh=mesh, in_specs=merged)
    for name, wanted, spec in zip(arrays, specs, types, strict=True):
        hint = f"its type has {spec}; jax.sharding.reshard splits it."
        _check(op, name, axis_name, wanted, spec, hint)
    return SplitAxis(axis_name, size)


def _check(
    op: str, name: str, axis_name: str, wanted: PartitionSpec, given: Iterable[Any], hint: str
) -> None:
    """Refuse a spec that is not split over the axis where it must be."""
    entries = tuple(given)
    for i, entry in enumerate(wanted):
        if entry == axis_name and entries[i : i + 1] not in ((axis_name,), ((axis_name,),)):
            raise ValueError(f"{op}: axis {i} of {name} must be split over {axis_name!r}, {hint}")


def _merged(spec: PartitionSpec, other: PartitionSpec) -> PartitionSpec:
    """The entries of a spec, and of the other where it has none."""
    rank = max(len(spec), len(other))
    first, second = ((*x, *(None,) * (rank - len(x))) for x in (spec, other))
    return PartitionSpec(*(a if a is not None else b for a, b in zip(first, second, strict=True)))
