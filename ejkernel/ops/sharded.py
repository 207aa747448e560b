"""One `shard_map` for every op: a few specs given, the rest derived from the axis letters."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ejkernel.ops import axes
from ejkernel.ops.implementation import CallInputs, Op

Axes = tuple[str, ...]  # the mesh axes that split one dimension
Letters = tuple[str, ...] | None  # of the dimensions of one array


def shard(
    op: Op,
    run: Callable[[CallInputs], Any],
    inputs: CallInputs,
    mesh: Mesh | AbstractMesh,
    in_specs: object,
    out_specs: object,
) -> Any:
    """`run(inputs)` with every array split over `mesh` as the specs and the letters say."""
    if in_specs is None:
        raise ValueError(
            f"{op.name}: mesh= needs in_specs=, one PartitionSpec for each of "
            f"{', '.join(op.operands[:3])}."
        )
    bound = _bind(op, inputs, mesh, in_specs)
    few = _few(op, inputs)
    inputs, bound = _regroup(op, inputs, mesh, bound)
    leaves, treedef = jax.tree.flatten(inputs)
    letters = _letters(op, inputs)
    _check_sizes(op, leaves, letters, mesh, bound)
    specs = [_spec(letter, bound, x.shape) for x, letter in zip(leaves, letters, strict=True)]
    results = axes.of_fields(op.outputs, batched=any(map(axes.leads, letters)))
    derived = op.outputs(*(_spec(letter, bound) for letter in results))
    _check_out_specs(op, out_specs, derived)
    outputs = jax.shard_map(
        _summed(op, run, bound, results),
        mesh=mesh,
        in_specs=(jax.tree.unflatten(treedef, specs),),
        out_specs=derived,
        check_vma=False,  # a kernel's outputs carry no replication types
    )(inputs)
    return op.outputs(*(_once(x, letter, few) for x, letter in zip(outputs, results, strict=True)))


def _letters(op: Op, inputs: CallInputs) -> list[Letters]:
    """The letters to split by: of a replicated field, batch and heads alone."""
    paths, _ = jax.tree_util.tree_flatten_with_path(inputs)
    return [
        tuple(x if x.lstrip("#") in ("b", "n") else "" for x in letters)
        if letters and getattr(path[0], "name", None) in op.replicated
        else letters
        for (path, _), letters in zip(paths, axes.of_leaves(inputs), strict=True)
    ]


def _summed(
    op: Op,
    run: Callable[[CallInputs], Any],
    bound: Mapping[str, Axes],
    results: list[tuple[str, ...]],
) -> Callable[[CallInputs], Any]:
    """`run`, with the results of the shards summed over the axes of a contracted letter."""
    over = {axis: letter for letter in sorted(op.contracted) for axis in bound.get(letter, ())}
    for letter in (letter.removeprefix("#") for letters in results for letter in letters):
        if shared := [axis for axis in bound.get(letter, ()) if axis in over]:
            raise ValueError(
                f"{op.name}: the mesh axis {shared[0]!r} cannot split both {letter!r} and "
                f"{over[shared[0]]!r}."
            )
    return (lambda inputs: jax.lax.psum(run(inputs), tuple(over))) if over else run


def _bind(
    op: Op, inputs: CallInputs, mesh: Mesh | AbstractMesh, in_specs: object
) -> dict[str, Axes]:
    """Which mesh axes split each letter, from the specs that were given."""
    if isinstance(in_specs, PartitionSpec) or not isinstance(in_specs, tuple | list):
        raise ValueError(
            f"{op.name}: in_specs must be a tuple of PartitionSpecs, got {in_specs!r}."
        )
    fields: tuple[str, ...] = getattr(inputs, "_fields", ())
    required = [name for name in fields if name not in getattr(inputs, "_field_defaults", ())]
    least = min(3, sum(name in required for name in op.operands))
    if not least <= len(in_specs) <= len(op.operands):
        raise ValueError(
            f"{op.name}: in_specs needs {least} to {len(op.operands)} entries, for "
            f"{', '.join(op.operands)}, got {len(in_specs)}."
        )
    bound: dict[str, Axes] = {}
    said_by: dict[str, str] = {}
    for name, spec in zip(op.operands, in_specs, strict=False):
        split = [_mesh_axes(entry) for entry in (spec or ())]
        _check_axes(op, name, split, mesh)
        array = getattr(inputs, name, None)
        if array is None:
            if any(split) and name not in fields:
                raise ValueError(f"{op.name}: {name} cannot be split over a mesh, got {spec}.")
            continue
        letters = axes.of_field(type(inputs), name, array.ndim)
        if len(split) > len(letters):
            raise ValueError(
                f"{op.name}: the spec {spec} of {name} has more than {len(letters)} axes."
            )
        split += [()] * (len(letters) - len(split))
        for letter, size, over in zip(letters, array.shape, split, strict=True):
            if letter.startswith("#") and size == 1:
                continue
            letter = letter.removeprefix("#")
            if over and letter not in op.shardable:
                raise ValueError(
                    f"{op.name}: {name} cannot be split along {letter!r} over mesh axis "
                    f"{'/'.join(over)}{op.sharding_hints.get(letter, '')}."
                )
            if bound.setdefault(letter, over) != over:
                raise ValueError(
                    f"{op.name}: the specs of {said_by[letter]} and {name} split the axis "
                    f"{letter!r} differently, over {bound[letter] or None} and {over or None}."
                )
            said_by.setdefault(letter, name)
    return bound


def _mesh_axes(entry: str | Iterable[str] | None) -> Axes:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _check_axes(op: Op, name: str, split: list[Axes], mesh: Mesh | AbstractMesh) -> None:
    for axis in (axis for entry in split for axis in entry):
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{op.name}: the spec of {name} names the mesh axis {axis!r}; the mesh has "
                f"{', '.join(map(str, mesh.axis_names))}."
            )


def _size(mesh: Mesh | AbstractMesh, over: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in over)


def _regroup(
    op: Op, inputs: CallInputs, mesh: Mesh | AbstractMesh, bound: Mapping[str, Axes]
) -> tuple[CallInputs, dict[str, Axes]]:
    """Split key heads as their query heads, repeated where there are too few of them."""
    bound = dict(bound)
    for few, many in op.grouped_axes.items():
        over = bound.get(many, ())
        if bound.get(few, ()) not in ((), over):
            raise ValueError(
                f"{op.name}: axis {few!r} must be split as {many!r}, over {over or None}, "
                f"got {bound[few]}."
            )
        bound[few] = over
        shards = _size(mesh, over)

        def repeat(
            x: jax.Array, letter: Letters, few: str = few, shards: int = shards
        ) -> jax.Array:
            if letter is None or few not in letter:
                return x
            axis = letter.index(few)
            times = math.lcm(x.shape[axis], shards) // x.shape[axis]
            return x if times == 1 else jnp.repeat(x, times, axis)

        leaves, treedef = jax.tree.flatten(inputs)
        repeated = map(repeat, leaves, axes.of_leaves(inputs))
        inputs = jax.tree.unflatten(treedef, list(repeated))
    return inputs, bound


def _few(op: Op, inputs: CallInputs) -> dict[str, int]:
    """How many key heads there are before any is repeated."""
    return {
        name: size
        for x, letters in zip(jax.tree.leaves(inputs), axes.of_leaves(inputs), strict=True)
        for size, name in zip(x.shape, letters or (), strict=False)
        if name in op.grouped_axes
    }


def _once(x: jax.Array, letters: tuple[str, ...], few: Mapping[str, int]) -> jax.Array:
    """A result with each key head once; its copies on other devices are equal."""
    for axis, name in enumerate(letters):
        if x.shape[axis] > few.get(name, x.shape[axis]):
            # Not a slice with a stride: its gradient comes out wrong when XLA splits the axis.
            copies = x.reshape(*x.shape[:axis], few[name], -1, *x.shape[axis + 1 :])
            x = jax.lax.index_in_dim(copies, 0, axis + 1, keepdims=False)
    return x


def _check_sizes(
    op: Op,
    leaves: list[Any],
    letters: list[Letters],
    mesh: Mesh | AbstractMesh,
    bound: Mapping[str, Axes],
) -> None:
    for x, letter in zip(leaves, letters, strict=True):
        for size, name in zip(x.shape, letter or (), strict=False):
            over = () if name.startswith("#") and size == 1 else bound.get(name.lstrip("#"), ())
            if size % _size(mesh, over):
                raise ValueError(
                    f"{op.name}: an axis {name!r} of {size} does not divide over mesh axis "
                    f"{'/'.join(over)} of size {_size(mesh, over)}."
                )


def _spec(
    letters: Letters,
    bound: Mapping[str, Axes],
    shape: tuple[int, ...] | None = None,
) -> PartitionSpec:
    """The spec of one array; an axis "#x" of size 1 is not split."""
    entries = []
    for position, letter in enumerate(letters or ()):
        over = bound.get(letter.removeprefix("#"), ())
        if shape and letter.startswith("#") and shape[position] == 1:
            over = ()
        entries.append(over[0] if len(over) == 1 else over or None)
    return PartitionSpec(*entries)


def _trim(spec: Iterable[str | Iterable[str] | None] | None) -> tuple[Axes, ...]:
    entries = [_mesh_axes(entry) for entry in (spec or ())]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def _check_out_specs(op: Op, out_specs: object, derived: tuple[PartitionSpec, ...]) -> None:
    """Given out_specs must say what the letters say: another layout would be wrong, not slow."""
    if out_specs is None:
        return
    given: list[Any] = [out_specs]
    if isinstance(out_specs, tuple | list) and not isinstance(out_specs, PartitionSpec):
        given = list(out_specs)
    for one, expected in zip(given, derived, strict=False):
        if _trim(one) != _trim(expected):
            raise ValueError(
                f"{op.name}: out_specs {one} does not follow from in_specs, which give {expected}."
            )
