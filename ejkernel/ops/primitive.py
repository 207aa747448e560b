"""One JAX primitive for every op, so that every transformation finds a rule of its own.

A `Stage` is a function of an op that JAX treats as a whole: the value, its derivatives. Inside a
program it is one equation, `ejkernel_call`; what becomes of it:

    jvp, transpose    the rules of the stage (`ops.differentiable`)
    vmap              the mapped axis joins the batch axis (`ops.batching`)
    lowering          the implementation itself; where a program has several devices, with a
                      partitioning rule (`ops.partitioned`); for another backend than the one that
                      was expected, the implementation of that backend
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax._src.core import NamedAxisEffect, ShardingTypeError
from jax.extend import core
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad, mlir
from jax.interpreters import batching as jax_batching
from jax.sharding import Mesh
from jax.tree_util import PyTreeDef
from jaxtyping import PyTree

from ejkernel.errors import UnsupportedError
from ejkernel.ops import axes, batching, partitioned
from ejkernel.ops.implementation import CallInputs, Op
from ejkernel.ops.meshes import varying_axes
from ejkernel.ops.platform import Device, backend_of, describe, target

call_p = core.Primitive("ejkernel_call")
call_p.multiple_results = True
call_p.is_high = lambda *avals, **params: False  # whatever its program holds is lowered with it
# As for `custom_partitioning`: the lowering has to know the devices of the program.
dispatch.prim_requires_devices_during_lowering.add(call_p)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Stage:
    """A function of an op that JAX treats as a whole; arguments and result are trees.

    Attributes:
        op: whose axis letters say how it is batched and split.
        run: the function.
        reselect: the function for arrays of other shapes or for another device, with a choice of
            its own.
        partitionable: the function in operations that XLA itself can split over devices.
        partial: from inputs and contracted letters that are split, the stage for shards whose
            results are summed over these letters; None: this one.
        device: the device that `run` was chosen for; None: it runs anywhere.
        sums: whether a result that lacks a split letter is a sum over it, as a gradient is.
        jvp: from arguments and their tangents, None where a tangent is 0, results and theirs.
        transposes: for the position of a linear argument, from all arguments and the cotangent of
            the result, the cotangent of that argument.
    """

    op: Op
    run: Callable[..., PyTree]
    reselect: Callable[[Device | None], Callable[..., PyTree]]
    partitionable: Callable[[], Callable[..., PyTree]]
    device: Device | None
    partial: Callable[[CallInputs, frozenset[str]], "Stage"] | None = None
    sums: bool = False
    jvp: Callable[[tuple[PyTree, ...], tuple[PyTree, ...]], tuple[PyTree, PyTree]]
    transposes: Mapping[int, Callable[..., PyTree]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A stage with the structure of its arguments and results, as the equation carries it."""

    stage: Stage
    arguments: PyTreeDef
    results: PyTreeDef
    kept: tuple[int, ...]  # the leaves of the result, each once: residuals are often outputs too
    shapes: tuple[Any, ...]  # of all leaves of the result

    def __repr__(self) -> str:
        return self.stage.op.name

    def trees(self, leaves: Iterable[Any]) -> tuple[PyTree, ...]:
        return jax.tree.unflatten(self.arguments, leaves)

    def flat(self, run: Callable[..., PyTree]) -> Callable[..., list[Any]]:
        """`run` as a function of leaves that returns leaves, as `run` of a stage becomes one."""

        def flat(*leaves: Any) -> list[Any]:
            results = jax.tree.leaves(run(*self.trees(leaves)))
            return [results[i] for i in self.kept]

        return flat


def bind(stage: Stage, *trees: PyTree, like: PyTree = None) -> PyTree:
    """`stage.run(*trees)` as one equation; `like` has the structure and shapes of the result."""
    leaves, arguments = jax.tree.flatten(trees)
    if like is None:
        found: list[PyTreeDef] = []

        def flat(*leaves: Any) -> list[Any]:
            results = stage.run(*jax.tree.unflatten(arguments, leaves))
            found[:] = [jax.tree.structure(results)]
            return jax.tree.leaves(results)

        jaxpr = jax.make_jaxpr(flat)(*leaves)
        structure, shapes = found[0], tuple(jaxpr.out_avals)
        places, kept, jaxpr = _each_once(jaxpr)
    else:
        examples, structure = jax.tree.flatten(like)
        shapes = tuple(jax.typeof(x).to_tangent_aval() for x in examples)
        places, kept, jaxpr = range(len(shapes)), tuple(range(len(shapes))), None
    out = call_p.bind(*leaves, call=_Call(stage, arguments, structure, kept, shapes), jaxpr=jaxpr)
    return jax.tree.unflatten(structure, [out[i] for i in places])


def _each_once(jaxpr: ClosedJaxpr) -> tuple[Sequence[int], tuple[int, ...], ClosedJaxpr]:
    """The program without results that it gives twice; where each is now, which ones are kept."""
    first: dict[int, int] = {}
    kept: list[int] = []
    for i, x in enumerate(jaxpr.jaxpr.outvars):
        if id(x) not in first:
            first[id(x)] = len(kept)
            kept.append(i)
    outvars = jaxpr.jaxpr.outvars
    trimmed = jaxpr.jaxpr.replace(
        outvars=[outvars[i] for i in kept], debug_info=jaxpr.jaxpr.debug_info.with_unknown_names()
    )
    return [first[id(x)] for x in outvars], tuple(kept), ClosedJaxpr(trimmed, jaxpr.consts)


@call_p.def_abstract_eval
def _abstract(*avals: Any, call: _Call, jaxpr: ClosedJaxpr | None) -> tuple[Any, ...]:
    return tuple(call.shapes[i] for i in call.kept)


@call_p.def_impl
def _run(*leaves: Any, call: _Call, jaxpr: ClosedJaxpr | None) -> list[Any]:
    return call.flat(call.stage.run)(*leaves)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: _Call, jaxpr: ClosedJaxpr | None
) -> tuple[list[Any], list[Any]]:
    given = [None if isinstance(x, ad.Zero) else x for x in tangents]
    results, d_results = call.stage.jvp(call.trees(primals), call.trees(given))
    leaves, d_leaves = jax.tree.leaves(results), at_leaves_of(results, d_results)
    zero = lambda x: ad.Zero(jax.typeof(x).to_tangent_aval())
    return [leaves[i] for i in call.kept], [
        zero(leaves[i]) if d_leaves[i] is None else d_leaves[i] for i in call.kept
    ]


def _transpose(
    cotangents: Sequence[Any], *leaves: Any, call: _Call, jaxpr: ClosedJaxpr | None
) -> list[Any]:
    unknown = [ad.is_undefined_primal(x) for x in leaves]
    trees = call.trees(None if u else x for u, x in zip(unknown, leaves, strict=True))
    known = dict(zip(call.kept, map(ad.instantiate_zeros, cotangents), strict=True))
    # A result that stands in two places has the cotangents of both in the first.
    d_leaves = [known.get(i) for i in range(len(call.shapes))]
    d_results = jax.tree.unflatten(call.results, d_leaves)
    gradients: list[Any] = []
    for position, indices in enumerate(call.trees(range(len(leaves)))):
        places = jax.tree.leaves(indices)
        if not any(unknown[i] for i in places):
            gradients += [None] * len(places)
        elif position in call.stage.transposes:
            found = call.stage.transposes[position](*trees, d_results)
            gradients += at_leaves_of(indices, found)
        else:
            raise NotImplementedError(
                f"{call.stage.op.name}: this derivative is not linear in the argument for which "
                "JAX transposes it."
            )
    return [
        None if not u else ad.Zero(x.aval) if g is None else _as_gradient_of(x.aval, g)
        for g, x, u in zip(gradients, leaves, unknown, strict=True)
    ]


def _as_gradient_of(primal: Any, found: Any) -> Any:
    """The gradient of an array that several calls share is the sum of what each of them finds.

    The calls are those of the devices, or those that a vmap has put into one with a batch axis,
    which an array that is not mapped does not have.
    """
    if more := found.ndim - primal.ndim:
        found = found.sum(tuple(range(more)))
    return summed_over_devices(found, primal)


def at_leaves_of(like: PyTree, tree: PyTree) -> list[Any]:
    """For each leaf of `like` that of `tree` in the same place, None where `tree` has none."""
    found = dict(jax.tree_util.tree_leaves_with_path(tree))
    return [found.get(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]


def summed_over_devices(gradient: Any, primal: Any) -> Any:
    """The gradient of an array that devices share is the sum of what each of them finds."""
    if gradient is None:
        return None
    shared = varying_axes(gradient) - varying_axes(primal)
    return jax.lax.psum(gradient, tuple(sorted(shared))) if shared else gradient


def _batch(
    leaves: Sequence[Any], mapped_axes: Sequence[Any], *, call: _Call, jaxpr: ClosedJaxpr | None
) -> tuple[list[Any], list[int]]:
    mapped = [axis is not None for axis in mapped_axes]
    moved = [
        jnp.moveaxis(x, axis, 0) if is_mapped else x
        for x, axis, is_mapped in zip(leaves, mapped_axes, mapped, strict=True)
    ]
    size = next(x.shape[0] for x, is_mapped in zip(moved, mapped, strict=True) if is_mapped)
    again = functools.partial(bind, call.stage)
    try:
        results = batching.batched(again, call.stage.run, call.trees(moved), mapped, size)
    except ShardingTypeError as error:
        raise UnsupportedError(
            f"{call.stage.op.name}: jax.vmap cannot map over an axis that is split over explicit "
            "mesh axes; make it the batch axis of the call."
        ) from error
    leaves = jax.tree.leaves(results)
    return [leaves[i] for i in call.kept], [0] * len(call.kept)


def _lower(context: Any, *values: Any, call: _Call, jaxpr: ClosedJaxpr | None) -> Any:
    module = context.module_context
    run, device = call.stage.run, call.stage.device
    if device is not None:
        actual = _actual_device(call.stage.op, device, module)
        if (actual.platform, actual.kind) != (device.platform, device.kind):
            run, device, jaxpr = call.stage.reselect(actual), actual, None
    function = call.flat(run) if jaxpr is None else core.jaxpr_as_fun(jaxpr)
    if partitioned.over_several_devices(module.axis_context):
        if {backend_of(name) for name in module.platforms} & partitioned.WITHOUT_RULES:
            if device is not None:
                function = call.flat(call.stage.partitionable())
        elif getattr(module.lowering_parameters, "for_export", False):
            raise UnsupportedError(
                f"{call.stage.op.name}: a program over several devices with automatic mesh axes "
                "cannot be exported: shard over explicit axes (jax.set_mesh), pass mesh= and "
                "in_specs=, or call inside jax.shard_map."
            )
        else:
            jaxpr = jaxpr or jax.make_jaxpr(function)(*context.avals_in)
            # XLA asks a rule for its program where no axis is mapped. It splits itself what
            # exchanges data over one.
            if not any(isinstance(x, NamedAxisEffect) for x in jaxpr.effects):
                function = functools.partial(_partitioning(call, device, context.avals_in), jaxpr)
    return mlir.lower_fun(function, multiple_results=True)(context, *values)


def _actual_device(op: Op, expected: Device, module: Any) -> Device:
    """The device of the program, which may be another than its trace expected."""
    backends = [backend_of(name) for name in module.platforms]
    if len(backends) > 1:
        raise UnsupportedError(
            f"{op.name}: a program for several backends, here {', '.join(module.platforms)}, needs "
            "platform='xla'; or make one program for each."
        )
    mesh = getattr(module.axis_context, "mesh", None)
    devices = getattr(module.axis_context, "device_assignment", None) or (
        mesh.devices.flat if isinstance(mesh, Mesh) else ()
    )
    # The devices of an exported program are those of this machine, whatever it is for. It may have
    # been traced before somebody named its target.
    for device in (target(), *map(describe, devices[:1]), expected):
        if device is not None and device.platform == backends[0]:
            return device
    raise UnsupportedError(
        f"{op.name}: this program is for a {backends[0].upper()} and it is not known which: say so "
        "with `ejkernel.ops.target_device`, or use platform='xla', which runs on all of them."
    )


def _partitioning(
    call: _Call, device: Device | None, leaves: Sequence[Any]
) -> partitioned.PartitionRule:
    trees = call.trees(leaves)
    letters = axes.of_leaves(jax.tree.unflatten(call.results, call.shapes))
    op = call.stage.op

    def local(starts: Mapping[str, Any], *leaves: Any) -> list[Any]:
        def of_share(inputs: CallInputs, *rest: PyTree) -> PyTree:
            inputs, stage = op.share(inputs, starts), call.stage
            if stage.partial is not None and (summed := op.contracted.intersection(starts)):
                stage = stage.partial(inputs, summed)
            return stage.reselect(device)(inputs, *rest)

        return call.flat(of_share)(*leaves)

    return partitioned.PartitionRule(
        op=op,
        shardable=op.shardable - op.unsplittable(trees[0]),
        run=local,
        operands=tuple(axes.of_leaves(trees)),
        results=tuple(letters[i] for i in call.kept),
        sums=call.stage.sums,
        cotangents=len(jax.tree.leaves(trees[-1])) if call.stage.sums else 0,
    )


ad.primitive_jvps[call_p] = _jvp
ad.primitive_transposes[call_p] = _transpose
jax_batching.primitive_batchers[call_p] = _batch
mlir.register_lowering(call_p, _lower)
