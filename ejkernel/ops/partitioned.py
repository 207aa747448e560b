"""One partitioning rule for every op: how automatic sharding splits a call, from its axis letters.

Under `jit`, XLA decides how arrays are split over the devices after the program is traced. A kernel
is opaque to it, so that without a rule every operand is gathered on every device. `PartitionRule`
gives a call such a rule: batch and heads stay split, what cannot be split is gathered, and each
device runs the implementation that is best for its share.

    factors     one for each axis letter; query heads are key heads times the group, `(k g)`
    splits      letters of `Op.shardable`, each over the mesh axes that its first operand has it on
    results     split as their letters; what lacks a split letter is summed over its devices

On one device, and inside a `shard_map` over all axes, a call needs no rule. TPUs have no such
rules: there XLA splits its own operations as it can, and a call that names kernels is refused.
"""

import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ejkernel.ops.implementation import Op
from ejkernel.ops.meshes import axes_size
from ejkernel.ops.picked import Picked, picked_heads

# The compilers that know no rule but their own: libtpu has no `custom_partitioning`.
WITHOUT_RULES = frozenset({"tpu"})

Letters = tuple[str, ...]
MeshAxes = tuple[str, ...]


def over_several_devices(context: Any) -> bool:
    """Whether XLA may split the arrays of a program that is lowered in this axis context."""
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        devices = getattr(context, "device_assignment", None)
        return devices is not None and len(devices) > 1
    automatic = set(mesh.axis_names) - set(getattr(context, "manual_axes", ()))
    return any(mesh.shape[axis] > 1 for axis in automatic)


def _in_this_context(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`run` with the settings of this thread, and no mesh: XLA compiles in threads of its own."""
    context = contextvars.copy_context()
    x64 = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]

    @functools.wraps(run)
    def in_context(*arguments: Any) -> list[Any]:
        with (
            jax.enable_x64(x64),
            jax.sharding.use_abstract_mesh(AbstractMesh((), ())),
        ):
            return context.copy().run(run, *arguments)

    return in_context


@dataclasses.dataclass(frozen=True, eq=False)
class PartitionRule:
    """How one call is split.

    Attributes:
        op: whose letters may be split.
        shardable: the letters that this call can split.
        run: the call on one device's share of the leaves, after the index at which the share
            begins, by letter.
        operands: the letters of every leaf; None where nothing says.
        results: those of every result.
        sums: whether a result that lacks a split letter is a sum over it, as a gradient is.
        cotangents: the last so many operands are cotangents of results.
    """

    op: Op
    shardable: frozenset[str]
    run: Callable[..., list[Any]]
    operands: tuple[Letters | None, ...]
    results: tuple[Letters | None, ...]
    sums: bool
    cotangents: int

    def __call__(self, jaxpr: ClosedJaxpr, *leaves: Any) -> list[Any]:
        """The call as XLA splits it; `jaxpr` is the call on whole arrays."""
        # Constants become operands, since `custom_partitioning` takes no others.
        count = len(jaxpr.consts)
        rule = dataclasses.replace(
            self, operands=(None,) * count + self.operands, run=_in_this_context(self.run)
        )
        call = custom_partitioning(
            lambda *given: core.jaxpr_as_fun(ClosedJaxpr(jaxpr.jaxpr, given[:count]))(
                *given[count:]
            )
        )
        shapes = [jnp.shape(x) for x in (*jaxpr.consts, *leaves)]
        results = [x.shape for x in jaxpr.out_avals]
        x64 = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
        call.def_partition(
            partition=functools.partial(rule.split, count, x64),
            sharding_rule=lambda mesh, *types: _sharding_rule(rule, mesh, shapes, results),
        )
        return call(*jaxpr.consts, *leaves)

    def split(
        self,
        constants: int,
        x64: bool,
        given: Mesh,
        operands: Sequence[Any],
        results: Sequence[Any],
    ) -> tuple:
        """What each device runs, and how operands and results are split for it."""
        if given.empty:  # some mesh axes are manual: XLA speaks of the others without names
            mesh, entries = _without_names([*operands, *results])
        else:
            mesh, entries = given, [getattr(x.sharding, "spec", ()) for x in (*operands, *results)]
        over, picked = self._bound(mesh, entries, operands, results)
        if given.empty and self._exchanges(over, picked, results):
            over, picked = {}, {}  # and it is not known which devices would exchange
        specs = [_spec(x, over, y.shape) for x, y in zip(self.operands, operands, strict=True)]
        result_specs = [_spec(x, over, y.shape) for x, y in zip(self.results, results, strict=True)]
        named = lambda these: [NamedSharding(mesh, spec) for spec in these]
        sizes = self._sizes(operands)

        def local(*leaves: Any) -> list[Any]:
            last = len(leaves) - self.cotangents
            own = [
                self._own(x, letters, over, picked, is_cotangent=i >= last)
                for i, (x, letters) in enumerate(zip(leaves, self.operands, strict=True))
            ]
            starts = {
                letter: jax.lax.axis_index(axes) * (sizes[letter] // axes_size(mesh, axes))
                for letter, axes in over.items()
            }
            found = self.run(starts, *own[constants:])
            return [
                self._whole(x, letters, full.shape, over, picked).astype(full.dtype)
                for x, letters, full in zip(found, self.results, results, strict=True)
            ]

        def in_threads_of_xla(*leaves: Any) -> list[Any]:
            with jax.enable_x64(x64):
                return local(*leaves)

        return mesh, in_threads_of_xla, named(result_specs), tuple(named(specs))

    def _own(
        self,
        x: Any,
        letters: Letters | None,
        over: Mapping[str, MeshAxes],
        picked: Mapping[str, Picked],
        is_cotangent: bool,
    ) -> Any:
        """What a device uses of an operand.

        Of several devices that have the same part of a result, only the first uses its cotangent,
        since their gradients are summed. A result that lacks a contracted letter is a sum itself:
        its cotangent is for all of them.
        """
        parts = {i: picked[letter] for i, letter in enumerate(letters or ()) if letter in picked}
        same = {axis for letter in {*over} - self.op.contracted for axis in over[letter]}
        same -= _axes_of(letters, over, jnp.shape(x))
        for axis, part in parts.items():
            same -= set(part.over)
            x = part.take(x, axis)
            x = part.of_first(x) if is_cotangent else x
        if is_cotangent and same:
            first = jax.lax.axis_index(tuple(sorted(same))) == 0
            x = jnp.where(first, x, jnp.zeros_like(x))
        return x

    def _whole(
        self,
        x: Any,
        letters: Letters | None,
        shape: tuple[int, ...],
        over: Mapping[str, MeshAxes],
        picked: Mapping[str, Picked],
    ) -> Any:
        """A result as all devices together have it."""
        summed = self._summed_axes(letters, shape, over)
        own = {i: picked[letter] for i, letter in enumerate(letters or ()) if letter in picked}
        for part in own.values():  # whose `put_back` sums over these axes
            summed -= set(part.over)
        x = jax.lax.psum(x, tuple(sorted(summed))) if summed else x
        for axis, part in own.items():
            x = part.put_back(x, axis, shape[axis], self.sums)
        return x

    def _summed_axes(
        self, letters: Letters | None, shape: tuple[int, ...], over: Mapping[str, MeshAxes]
    ) -> set[str]:
        """The mesh axes over which a result is summed: they split letters that it does not have."""
        letters_summed = set(over) if self.sums else set(over) & self.op.contracted
        axes = {axis for letter in letters_summed for axis in over[letter]}
        return axes - _axes_of(letters, over, shape)

    def _exchanges(
        self,
        over: Mapping[str, MeshAxes],
        picked: Mapping[str, Picked],
        results: Sequence[Any],
    ) -> bool:
        """Whether the devices have to exchange anything."""
        return bool(picked) or any(
            self._summed_axes(letters, x.shape, over)
            for letters, x in zip(self.results, results, strict=True)
        )

    def _bound(
        self,
        mesh: Mesh | AbstractMesh,
        specs: Sequence[Any],
        operands: Sequence[Any],
        results: Sequence[Any],
    ) -> tuple:
        """The mesh axes that split each letter."""
        over: dict[str, MeshAxes] = {}
        used: set[str] = set()
        every = zip((*self.operands, *self.results), (*operands, *results), specs, strict=True)
        for letters, x, spec in every:
            entries = (*spec, *(None,) * (len(x.shape) - len(spec)))
            for letter, size, entry in zip(letters or (), x.shape, entries, strict=False):
                name = letter.removeprefix("#")
                if entry is None or name not in self.shardable or name in over:
                    continue
                found = (entry,) if isinstance(entry, str) else tuple(entry)
                if used & set(found) or size % axes_size(mesh, found):
                    continue
                over[name] = found
                used |= set(found)
        return self._grouped(mesh, over, operands)

    def _sizes(self, operands: Sequence[Any]) -> dict[str, int]:
        """The size of each letter; of a letter "#x" that may be 1, its own."""
        sizes: dict[str, int] = {}
        for letters, x in zip(self.operands, operands, strict=True):
            for letter, size in zip(letters or (), x.shape, strict=False):
                name = letter.removeprefix("#")
                sizes[name] = max(size, sizes.get(name, 1))
        return sizes

    def _grouped(
        self, mesh: Mesh | AbstractMesh, over: dict[str, MeshAxes], operands: Sequence[Any]
    ) -> tuple[dict[str, MeshAxes], dict[str, Picked]]:
        """Key heads split as the query heads that use them.

        Where there are fewer key heads than devices, each device has all and picks its own.
        """
        picked: dict[str, Picked] = {}
        sizes = self._sizes(operands)
        for few, many in self.op.grouped_axes.items():
            along = over.get(many) or over.get(few)
            over.pop(few, None)
            over.pop(many, None)
            if along is None:
                continue
            while along and sizes[many] % axes_size(mesh, along):
                along = along[:-1]
            if sizes[few] == 1:
                over[many] = along
                continue
            count = axes_size(mesh, along)
            if sizes[few] % count == 0:
                over[many] = over[few] = along
                continue
            if (found := picked_heads(sizes[few], sizes[many], count, along)) is not None:
                over[many], picked[few] = along, found
        return over, picked


def _spec(
    letters: Letters | None, over: Mapping[str, MeshAxes], shape: tuple[int, ...]
) -> PartitionSpec:
    entries: list[Any] = [None] * len(shape)
    for i, (letter, size) in enumerate(zip(letters or (), shape, strict=False)):
        split = over.get(letter.removeprefix("#"), ())
        if split and not (letter.startswith("#") and size == 1):
            entries[i] = split
    return PartitionSpec(*entries)


def _axes_of(
    letters: Letters | None, over: Mapping[str, MeshAxes], shape: tuple[int, ...]
) -> set[str]:
    """The mesh axes that split an array."""
    return {
        axis
        for letter, size in zip(letters or (), shape, strict=False)
        if not (letter.startswith("#") and size == 1)
        for axis in over.get(letter.removeprefix("#"), ())
    }


def _without_names(arrays: Sequence[Any]) -> tuple[AbstractMesh, list[tuple[Any, ...]]]:
    """A mesh with an axis for each dimension that the most split array is split along.

    And for each array the mesh axes of its dimensions, if it is split as that array is. Of arrays
    with the tilings (2, 1, 4, 1), (2, 1, 4, 1) and (1, 1), the first has the mesh axes `axis_0` of
    2 and `axis_2` of 4 devices:

        ("axis_0", None, "axis_2", None), ("axis_0", None, "axis_2", None), ()
    """
    tilings = [_tiling(x.sharding, len(x.shape)) for x in arrays]
    finest = max(tilings, key=math.prod, default=())
    names = {i: f"axis_{i}" for i, count in enumerate(finest) if count > 1}
    mesh = AbstractMesh(tuple(finest[i] for i in names), tuple(names.values()))
    return mesh, [
        tuple(names.get(i) for i in range(len(tiling))) if tiling == finest else ()
        for tiling in tilings
    ]


def _tiling(sharding: Any, rank: int) -> tuple[int, ...]:
    """The number of parts along each dimension; all 1 if the parts are not on devices 0, 1, ...

    Of an array of rank 4 that is split over eight devices:

        {devices=[2,1,4,1]<=[8]}                              (2, 1, 4, 1)
        {devices=[2,1,4,1]<=[4,2]T(1,0)}                      (1, 1, 1, 1): devices 0, 2, 4, ...
        {devices=[2,1,1,1,4]<=[8] last_tile_dim_replicate}    (1, 1, 1, 1): 4 copies of each part
    """
    hlo = sharding._to_xla_hlo_sharding(rank)
    whole = (1,) * rank
    if hlo.is_replicated() or hlo.is_manual() or hlo.subgroup_types():
        return whole
    counts = tuple(hlo.tile_assignment_dimensions())
    if hlo.replicate_on_last_tile_dim() or len(counts) != rank:
        return whole
    devices = list(hlo.tile_assignment_devices())
    return counts if devices == list(range(len(devices))) else whole


def _sharding_rule(
    rule: PartitionRule, mesh: Mesh, operands: list, results: list
) -> tuple[str, dict[str, Any]]:
    """The rule in Shardy's notation; which factors cannot be split, and sizes of groups."""
    sizes: dict[str, int] = {}
    for letters, shape in zip((*rule.operands, *rule.results), (*operands, *results), strict=True):
        for letter, size in zip(letters or (), shape, strict=False):
            sizes.setdefault(letter, size)
    unnamed = (f"u{i}" for i in range(10_000))
    fixed: dict[str, None] = {}
    groups: dict[str, int] = {}

    def nests(few: str, size: int) -> bool:
        """Whether all mesh axes that may split the query heads also split the key heads."""
        counts = [1]
        for devices in mesh.shape.values():
            counts += [count * devices for count in counts]
        return all(sizes[few] % count == 0 for count in counts if size % count == 0)

    def dimension(letter: str, size: int) -> str:
        name = letter.removeprefix("#")
        if letter.startswith("#") and size == 1:
            return next(unnamed)
        for few, many in rule.op.grouped_axes.items():
            if name == many and 1 < sizes.get(few, 1) < size and nests(few, size):
                groups[f"{few}g"] = size // sizes[few]
                return f"({few} {few}g)"
            if name == few and size == 1:
                return next(unnamed)
            if name == many and sizes.get(few) == size:
                return few
        if name not in rule.shardable:
            fixed[name] = None
        return name

    def side(all_letters: Sequence[Letters | None], shapes: list) -> str:
        arrays = []
        for letters, shape in zip(all_letters, shapes, strict=True):
            if letters is None:
                names = [next(unnamed) for _ in shape]
                fixed.update(dict.fromkeys(names))
            else:
                names = [dimension(x, size) for x, size in zip(letters, shape, strict=True)]
            arrays.append(" ".join(names) or "")
        return ", ".join(arrays)

    text = f"{side(rule.operands, operands)} -> {side(rule.results, results)}"
    return text, {"need_replication_factors": tuple(fixed), **groups}
