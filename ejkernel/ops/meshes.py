"""The mesh around a call: JAX's own context, and the older `with mesh:`."""

from typing import Any

import jax


def surrounding_mesh() -> Any:
    """The mesh of `jax.set_mesh`, of a trace, or of `with mesh:`; None without one."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract is not None and not abstract.empty:
        return abstract
    legacy = _legacy_mesh()
    return None if legacy is None or legacy.empty else legacy


def bound_axis_size(name: Any) -> int | None:
    """The size of a mesh axis over which the code is already mapped; None where it is not."""
    try:
        return jax.lax.axis_size(name)
    except NameError:
        return None


def varying_axes(x: Any) -> frozenset[str]:
    """The mapped mesh axes over which an array differs from device to device."""
    return getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", frozenset())


def result_shape(shape: tuple[int, ...], dtype: Any, *operands: Any) -> jax.ShapeDtypeStruct:
    """What a kernel gives that differs from device to device as its operands together do."""
    varying = frozenset().union(*map(varying_axes, operands))
    kind = jax.sharding.ManualAxisType(varying=varying)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def _legacy_mesh() -> Any:
    # No public name tells of `with mesh:`, and code that uses it must go on working.
    from jax._src import mesh

    resources = getattr(mesh, "thread_resources", None)
    return None if resources is None else resources.env.physical_mesh
