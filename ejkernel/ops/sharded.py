"""One `shard_map` for every op: a few specs given, the rest derived from the axis letters.

The specs are those of the call, or, for arrays whose types say how they are split (axes of type
`AxisType.Explicit`), those of the types.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ejkernel.ops import axes
from ejkernel.ops.implementation import CallInputs, Op
from ejkernel.ops.meshes import entry_axes
from ejkernel.ops.picked import Picked, picked_heads

Axes = tuple[str, ...]  # the mesh axes that split one dimension
Letters = tuple[str, ...] | None  # of the dimensions of one array
Parts = dict[int, Picked]  # by axis, what a device uses of an array that it has whole


class TypeSpecs(NamedTuple):
    """The specs that the types of all arrays of a call have, in the order of its leaves."""

    specs: tuple[PartitionSpec, ...]


def from_types(leaves: list[Any]) -> tuple[Mesh | AbstractMesh, TypeSpecs] | None:
    """The mesh and the specs of the types of these arrays; None if no type says how it is split.

    Outside of a `jax.set_mesh` a type that names a mesh but splits nothing over it counts, too: an
    array that has it does not mix with those that a computation makes there.
    """
    shardings = [getattr(getattr(x, "aval", None), "sharding", None) for x in leaves]
    if all(x is None or x.mesh.empty for x in shardings):  # as a rule
        return None
    mesh: Mesh | AbstractMesh | None = None
    outside = jax.sharding.get_abstract_mesh().empty
    specs: list[PartitionSpec] = []
    for x, sharding in zip(leaves, shardings, strict=True):
        spec = PartitionSpec() if sharding is None else sharding.spec
        split = any(entry is not None for entry in spec)
        specs.append(spec if split else PartitionSpec())
        if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
            continue
        if mesh is None and (split or outside):
            # A concrete array knows its devices, a traced one the mesh of its context.
            own = getattr(x, "sharding", None)
            mesh = own.mesh if isinstance(own, NamedSharding) else sharding.mesh
    return None if mesh is None else (mesh, TypeSpecs(tuple(specs)))


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
    if isinstance(in_specs, TypeSpecs):
        bound = _bind_types(op, inputs, in_specs)
    else:
        bound = _bind(op, inputs, mesh, in_specs)
    _check_sequence(op, bound)
    few = _few(op, inputs)
    inputs, bound, picked = _regroup(op, inputs, mesh, bound)
    leaves, treedef = jax.tree.flatten(inputs)
    letters = _letters(op, inputs)
    _check_sizes(op, leaves, letters, mesh, bound)
    specs = [_spec(letter, bound, x.shape) for x, letter in zip(leaves, letters, strict=True)]
    parts: list[Parts] = [_parts(letter, picked) for letter in letters]
    if isinstance(in_specs, TypeSpecs):
        for i, (x, own) in enumerate(zip(leaves, in_specs.specs, strict=True)):
            specs[i], more = _where_whole(x, specs[i], own, mesh)
            parts[i] |= more
    results = axes.of_fields(op.outputs, batched=any(map(axes.leads, letters)))
    _check_once(op, [*letters, *results], bound)
    derived = op.outputs(*(_spec(letter, bound) for letter in results))
    _check_out_specs(op, out_specs, derived)
    local = _summed(op, run, bound, results)
    sizes = _sizes(inputs)

    def of_parts(inputs: CallInputs) -> Any:
        own = [_taken(x, part) for x, part in zip(jax.tree.leaves(inputs), parts, strict=True)]
        starts = {
            letter: jax.lax.axis_index(over) * (sizes[letter] // _size(mesh, over))
            for letter, over in bound.items()
            if over and letter in sizes
        }
        outputs = local(op.share(jax.tree.unflatten(treedef, own), starts))
        return op.outputs(
            *(_put_back(x, letter, picked, few) for x, letter in zip(outputs, results, strict=True))
        )

    outputs = jax.shard_map(
        of_parts,
        mesh=mesh,
        in_specs=(jax.tree.unflatten(treedef, specs),),
        out_specs=derived,
        axis_names=_manual_axes(mesh, in_specs),
        check_vma=False,  # a kernel's outputs carry no replication types
    )(inputs)
    return op.outputs(*(_once(x, letter, few) for x, letter in zip(outputs, results, strict=True)))


def _manual_axes(mesh: Mesh | AbstractMesh, in_specs: object) -> set[str]:
    """The mesh axes to map over: all, or those that the types of arrays speak of."""
    if not isinstance(in_specs, TypeSpecs):
        return set(mesh.axis_names)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Explicit}


def _parts(letters: Letters, picked: Mapping[str, Picked]) -> Parts:
    """By axis, the part of an array that a device takes for itself."""
    return {i: picked[letter] for i, letter in enumerate(letters or ()) if letter in picked}


def _where_whole(
    x: jax.Array, spec: PartitionSpec, own: PartitionSpec, mesh: Mesh | AbstractMesh
) -> tuple[PartitionSpec, Parts]:
    """The spec with None where the type has the axis whole, and what a device takes of it."""
    entries, parts = list(spec), dict[int, Picked]()
    for axis, entry in enumerate(spec):
        if entry is not None and (axis >= len(own) or own[axis] is None):
            over = entry_axes(entry)
            parts[axis] = Picked(over, x.shape[axis] // _size(mesh, over))
            entries[axis] = None
    return PartitionSpec(*entries), parts


def _taken(x: jax.Array, parts: Parts) -> jax.Array:
    for axis, part in parts.items():
        x = part.take(x, axis)
    return x


def _put_back(
    x: jax.Array, letters: Letters, picked: Mapping[str, Picked], few: Mapping[str, int]
) -> jax.Array:
    for axis, letter in enumerate(letters or ()):
        if letter in picked:
            x = picked[letter].put_back(x, axis, few[letter], sums=False)
    return x


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


def _check_sequence(op: Op, bound: Mapping[str, Axes]) -> None:
    """A mesh axis that splits what `Op.over_axis` brings together splits nothing else."""
    together = {axis: letter for letter in sorted(op.sequence) for axis in bound.get(letter, ())}
    for letter, over in bound.items():
        if letter not in op.sequence and (shared := [axis for axis in over if axis in together]):
            raise ValueError(
                f"{op.name}: the mesh axis {shared[0]!r} cannot split both {letter!r} and "
                f"{together[shared[0]]!r}."
            )


def _check_once(op: Op, arrays: list[Letters], bound: Mapping[str, Axes]) -> None:
    """A mesh axis splits one axis of an array at most."""
    for letters in arrays:
        used: dict[str, str] = {}
        for name in (letter.removeprefix("#") for letter in letters or ()):
            for axis in bound.get(name, ()):
                if used.setdefault(axis, name) != name:
                    raise ValueError(
                        f"{op.name}: the mesh axis {axis!r} cannot split both {used[axis]!r} and "
                        f"{name!r}."
                    )


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
    shardable = op.shardable - op.unsplittable(inputs)
    for name, spec in zip(op.operands, in_specs, strict=False):
        split = [entry_axes(entry) for entry in (spec or ())]
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
            if over and letter not in shardable:
                raise _unsplittable(op, name, letter, repr(letter), over)
            if bound.setdefault(letter, over) != over:
                raise ValueError(
                    f"{op.name}: the specs of {said_by[letter]} and {name} split the axis "
                    f"{letter!r} differently, over {bound[letter] or None} and {over or None}."
                )
            said_by.setdefault(letter, name)
    return bound


def _bind_types(op: Op, inputs: CallInputs, given: TypeSpecs) -> dict[str, Axes]:
    """Which mesh axes split each letter, from the types; an array that is whole says nothing."""
    bound: dict[str, Axes] = {}
    said_by: dict[str, str] = {}
    shardable = op.shardable - op.unsplittable(inputs)
    paths, _ = jax.tree_util.tree_flatten_with_path(inputs)
    every = zip(paths, axes.of_leaves(inputs), given.specs, strict=True)
    for (path, x), letters, spec in every:
        name = str(getattr(path[0], "name", path[0]))
        entries = [entry_axes(entry) for entry in spec]
        for axis, over in enumerate(entries):
            letter = letters[axis].removeprefix("#") if letters else ""
            if not over or (letters and letters[axis].startswith("#") and x.shape[axis] == 1):
                continue
            if letter not in shardable:
                raise _unsplittable(
                    op, name, letter, repr(letter) if letter else f"axis {axis}", over
                )
            if bound.setdefault(letter, over) != over:
                raise ValueError(
                    f"{op.name}: {said_by[letter]} and {name} are split along {letter!r} "
                    f"differently, over {bound[letter]} and {over}."
                )
            said_by.setdefault(letter, name)
    for few, many in op.grouped_axes.items():  # whole queries with split keys: split both
        if few in bound and many not in bound:
            bound[many] = bound[few]
    return bound


def _unsplittable(op: Op, name: str, letter: str, axis: str, over: Axes) -> ValueError:
    return ValueError(
        f"{op.name}: {name} cannot be split along {axis} over mesh axis {'/'.join(over)}"
        f"{op.sharding_hints.get(letter, '')}."
    )


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
) -> tuple[CallInputs, dict[str, Axes], dict[str, Picked]]:
    """Key heads split as their query heads; where there are too few, each device takes its own.

    If a device's query heads do not belong to whole key heads, the key heads are repeated.
    """
    bound, picked = dict(bound), dict[str, Picked]()
    sizes = _sizes(inputs)
    for few, many in op.grouped_axes.items():
        over = bound.get(many, ())
        if bound.get(few, ()) not in ((), over):
            raise ValueError(
                f"{op.name}: axis {few!r} (key heads) must be split as {many!r} (query heads), "
                f"over {over or None}, got {bound[few]}."
            )
        shards = _size(mesh, over)
        too_few = sizes[few] % shards and sizes[many] % shards == 0
        if too_few and (part := picked_heads(sizes[few], sizes[many], shards, over)):
            bound[few], picked[few] = (), part
            continue
        bound[few] = over

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
    return inputs, bound, picked


def _few(op: Op, inputs: CallInputs) -> dict[str, int]:
    """How many key heads there are before any is repeated."""
    return {letter: size for letter, size in _sizes(inputs).items() if letter in op.grouped_axes}


def _sizes(inputs: CallInputs) -> dict[str, int]:
    """The size of each letter."""
    return {
        letter: size
        for x, letters in zip(jax.tree.leaves(inputs), axes.of_leaves(inputs), strict=True)
        for size, letter in zip(x.shape, letters or (), strict=False)
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
    entries = [entry_axes(entry) for entry in (spec or ())]
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
