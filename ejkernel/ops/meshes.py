"""The mesh around a call: JAX's own context, and the older `with mesh:`."""

import math
from collections.abc import Hashable, Iterable
from typing import Any

import jax
from jax.core import AbstractValue
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike, DTypeLike


def surrounding_mesh() -> Mesh | AbstractMesh | None:
    """The mesh of `jax.set_mesh`, of a trace, or of `with mesh:`; None without one."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract is not None and not abstract.empty:
        return abstract
    legacy = _legacy_mesh()
    return None if legacy is None or legacy.empty else legacy


def bound_axis_size(name: Hashable) -> int | None:
    """The size of a mesh axis over which the code is already mapped; None where it is not."""
    try:
        return jax.lax.axis_size(name)
    except NameError:
        return None


def axes_size(mesh: Mesh | AbstractMesh, names: Iterable[str]) -> int:
    """The number of devices along these mesh axes together."""
    return math.prod(mesh.shape[name] for name in names)


def entry_axes(entry: str | Iterable[str] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def varying_axes(x: Any) -> frozenset[str]:
    """The mapped mesh axes over which an array, a reference or a type differs between devices."""
    kind = x if isinstance(x, AbstractValue) else jax.typeof(x)
    return getattr(getattr(kind, "manual_axis_type", None), "varying", frozenset())


def vary_as(x: jax.Array, *operands: object) -> jax.Array:
    """`x`, varying over every mapped mesh axis over which one of the operands' arrays varies."""
    over = [varying_axes(leaf) for leaf in jax.tree.leaves(operands)]
    missing = frozenset[str]().union(*over) - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def result_shape(
    shape: tuple[int, ...], dtype: DTypeLike, *operands: ArrayLike
) -> jax.ShapeDtypeStruct:
    """The shape of a kernel's result; it varies over the mesh axes that an operand varies over."""
    varying = frozenset[str]().union(*map(varying_axes, operands))
    kind = jax.sharding.ManualAxisType(varying=varying)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def _legacy_mesh() -> Mesh | None:
    # No public name tells of `with mesh:`, and code that uses it must go on working.
    from jax._src import mesh

    resources = getattr(mesh, "thread_resources", None)
    return None if resources is None else resources.env.physical_mesh
