"""Derivatives of every op: any forward with any backward, forward mode, and second derivatives.

With `J` the Jacobian of a call, an op has two passes of its own, `f` and `B`. The others follow
from them, computed by XLA in forward mode, so that their memory grows as that of the passes:

    f(x)           the value, with residuals for the backward pass where somebody needs them
    B(x, c)        `J^T c`: the backward pass, of the platform that is best for it
    T(x, v)        `J v`: the tangent pass, `f` in forward mode
    H(x, v, c)     the derivative of `B(x, c)` along `v`: `B` in forward mode
    Q(x, v, w)     the derivative of `T(x, v)` along `w`: `T` in forward mode

Each is one equation of a program. Their rules close over each other:

    jvp            of f: T;  of T: T + Q;  of B: B + H
    transposes     of T in v: B;  of B in c: T
                   of H in v: H, since a Hessian is symmetric; in c: Q;  of Q in v or w: H

so that `jvp`, `grad`, `hessian`, `grad` of `grad` and `grad` of `jvp` never transpose a loop.
Residuals belong to the call and have no derivative of their own: H and Q compute theirs anew.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ejkernel.ops import axes
from ejkernel.ops.implementation import CallInputs, Op
from ejkernel.ops.platform import Device
from ejkernel.ops.primitive import Stage, at_leaves_of, bind, summed_over_devices


class Passes(NamedTuple):
    """The passes of a call as functions of arrays; a backward is chosen when it is needed."""

    value: Callable[[CallInputs], PyTree]  # inputs -> outputs
    forward: Callable[[CallInputs], tuple[PyTree, PyTree]]  # inputs -> outputs, residuals
    # inputs, residuals, d_outputs -> d_inputs
    backward: Callable[[CallInputs, PyTree, PyTree], PyTree]


class DerivativeRule(NamedTuple):
    """How a call of `op` is computed and differentiated.

    Attributes:
        passes: the passes of the call.
        reselect: those of a call of other shapes, or on another device than expected.
        xla: the passes that forward mode differentiates; raises where there are none.
        partitionable: the passes that XLA itself can split over devices; raises likewise.
        partial: from inputs and contracted letters that are split, the rule for shards whose
            results are summed over these letters.
        device: the device that `passes` were chosen for; None: they run anywhere.
    """

    op: Op
    passes: Passes
    reselect: Callable[[Device | None], Passes]
    xla: Callable[[], Passes]
    partitionable: Callable[[], Passes]
    partial: "Callable[[CallInputs, frozenset[str]], DerivativeRule]"
    device: Device | None = None

    @classmethod
    def of(cls, op: Op, passes: Passes) -> "DerivativeRule":
        """A rule whose passes are XLA's, or stand for them."""
        anywhere = lambda: passes
        return cls(
            op, passes, lambda device: passes, anywhere, anywhere, lambda *_: cls.of(op, passes)
        )


def apply(rule: DerivativeRule, inputs: CallInputs) -> PyTree:
    """The outputs of the call."""
    if not any(axes.of_leaves(inputs)):  # a user's kernel, which JAX batches and splits by itself
        return _without_letters(rule.passes, inputs)
    return bind(_value(rule), inputs)


def _stage(rule: DerivativeRule, name: str, **rules: Any) -> Stage:
    """A pass of the call; it is selected again for other shapes."""
    return Stage(
        op=rule.op,
        run=getattr(rule.passes, name),
        reselect=lambda device: getattr(rule.reselect(device), name),
        partitionable=lambda: getattr(rule.partitionable(), name),
        device=rule.device,
        **rules,
    )


def _by_xla(rule: DerivativeRule, run: Callable[..., PyTree], **rules: Any) -> Stage:
    """A derivative of the passes of XLA."""
    again = {"reselect": lambda device: run, "partitionable": lambda: run}
    return Stage(op=rule.op, run=run, device=None, **again, **rules)


def _partial(
    rule: DerivativeRule, stage: Callable[[DerivativeRule], Stage]
) -> Callable[[CallInputs, frozenset[str]], Stage]:
    """For `Stage.partial`: the same stage of the rule for shards."""
    return lambda inputs, letters: stage(rule.partial(inputs, letters))


def _value(rule: DerivativeRule) -> Stage:
    def jvp(trees: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[PyTree, PyTree]:
        outputs, residuals = _named(rule, bind(_forward(rule), *trees))
        return outputs, _tangent_of(rule, *trees, residuals, *tangents, outputs)

    return _stage(rule, "value", jvp=jvp, partial=_partial(rule, _value))


def _forward(rule: DerivativeRule) -> Stage:
    def jvp(trees: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[PyTree, PyTree]:
        outputs, residuals = bind(_forward(rule), *trees)
        d_outputs = _tangent_of(rule, *trees, residuals, *tangents, outputs)
        return (outputs, residuals), (d_outputs, jax.tree.map(lambda x: None, residuals))

    return _stage(rule, "forward", jvp=jvp, partial=_partial(rule, _forward))


def _backward(rule: DerivativeRule) -> Stage:
    def jvp(trees: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        inputs, residuals, cotangents = trees
        d_inputs, _, d_cotangents = tangents
        gradients = bind(_backward(rule), *trees)
        parts = []
        if _any(d_cotangents):
            full = _filled(d_cotangents, cotangents)
            parts.append(bind(_backward(rule), inputs, residuals, full, like=gradients))
        if _any(d_inputs):
            second = _second_backward(rule)
            parts.append(bind(second, inputs, residuals, d_inputs, cotangents, like=gradients))
        return gradients, _sum(parts)

    def transpose(
        inputs: CallInputs, residuals: PyTree, cotangents: PyTree, d_gradients: PyTree
    ) -> PyTree:
        tangent = _tangent(rule)
        like = jax.eval_shape(tangent.run, inputs, residuals, d_gradients)
        return bind(tangent, inputs, residuals, d_gradients, like=like)

    return _stage(rule, "backward", sums=True, jvp=jvp, transposes={2: transpose})


def _tangent(rule: DerivativeRule) -> Stage:
    def run(inputs: CallInputs, residuals: PyTree, d_inputs: PyTree) -> PyTree:
        return _directional(lambda x: _floats(rule.xla().value(x)), inputs, d_inputs)

    def jvp(trees: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        inputs, residuals, d_inputs = trees
        along, _, dd_inputs = tangents
        outputs = bind(_tangent(rule), *trees)
        parts = []
        if _any(dd_inputs):
            parts.append(bind(_tangent(rule), inputs, residuals, dd_inputs, like=outputs))
        if _any(along):
            second = _second_tangent(rule)
            parts.append(bind(second, inputs, residuals, d_inputs, along, like=outputs))
        return outputs, _sum(parts)

    def transpose(
        inputs: CallInputs, residuals: PyTree, d_inputs: PyTree, cotangents: PyTree
    ) -> PyTree:
        return bind(_backward(rule), inputs, residuals, cotangents)

    rules = {"jvp": jvp, "transposes": {2: transpose}, "partial": _partial(rule, _tangent)}
    return _by_xla(rule, run, **rules)


def _second_backward(rule: DerivativeRule) -> Stage:
    def run(inputs: CallInputs, residuals: PyTree, d_inputs: PyTree, cotangents: PyTree) -> PyTree:
        passes = rule.xla()
        gradients = lambda x: passes.backward(x, passes.forward(x)[1], cotangents)
        return _directional(gradients, inputs, d_inputs)

    def of_tangent(
        inputs: CallInputs, residuals: PyTree, d_inputs: PyTree, cotangents: PyTree, given: PyTree
    ) -> PyTree:
        return bind(_second_backward(rule), inputs, residuals, given, cotangents)

    def of_cotangents(
        inputs: CallInputs, residuals: PyTree, d_inputs: PyTree, cotangents: PyTree, given: PyTree
    ) -> PyTree:
        return bind(_second_tangent(rule), inputs, residuals, given, d_inputs)

    jvp = functools.partial(_jvp_of, run)
    transposes = {2: of_tangent, 3: of_cotangents}
    return _by_xla(rule, run, sums=True, jvp=jvp, transposes=transposes)


def _second_tangent(rule: DerivativeRule) -> Stage:
    def run(inputs: CallInputs, residuals: PyTree, d_inputs: PyTree, along: PyTree) -> PyTree:
        tangent = lambda x: _tangent(rule).run(x, residuals, d_inputs)
        return _directional(tangent, inputs, along)

    def of_first(
        inputs: CallInputs, residuals: PyTree, d_inputs: PyTree, along: PyTree, given: PyTree
    ) -> PyTree:
        return bind(_second_backward(rule), inputs, residuals, along, given)

    def of_second(
        inputs: CallInputs, residuals: PyTree, d_inputs: PyTree, along: PyTree, given: PyTree
    ) -> PyTree:
        return bind(_second_backward(rule), inputs, residuals, d_inputs, given)

    jvp = functools.partial(_jvp_of, run)
    rules = {"transposes": {2: of_first, 3: of_second}, "partial": _partial(rule, _second_tangent)}
    return _by_xla(rule, run, jvp=jvp, **rules)


def _tangent_of(
    rule: DerivativeRule, inputs: CallInputs, residuals: PyTree, d_inputs: PyTree, outputs: PyTree
) -> PyTree:
    return bind(_tangent(rule), inputs, residuals, d_inputs, like=_floats(outputs))


def _jvp_of(
    run: Callable[..., PyTree], trees: tuple[PyTree, ...], tangents: tuple[PyTree, ...]
) -> tuple[PyTree, PyTree]:
    """A third derivative, as JAX finds it."""
    return run(*trees), _directional(lambda given: run(*given), trees, tangents)


def _directional(run: Callable[[PyTree], PyTree], tree: PyTree, d_tree: PyTree) -> PyTree:
    """The derivative of `run` along `d_tree`, which has None where the direction is 0."""
    leaves, structure = jax.tree.flatten(tree)
    directions = at_leaves_of(tree, d_tree)
    moving = [i for i, x in enumerate(directions) if x is not None]

    def of_moving(given: list[Any]) -> PyTree:
        merged = list(leaves)
        for i, x in zip(moving, given, strict=True):
            merged[i] = x
        return run(jax.tree.unflatten(structure, merged))

    # Under vmap one of the two may have a batch axis where the other has none.
    pairs = [jnp.broadcast_arrays(leaves[i], directions[i]) for i in moving]
    primals, tangents = [x for x, _ in pairs], [d for _, d in pairs]
    return jax.jvp(of_moving, (primals,), (tangents,))[1]


def _floats(tree: PyTree) -> PyTree:
    """Only what has a derivative; None in place of the rest."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)


def _any(tree: PyTree) -> bool:
    return bool(jax.tree.leaves(tree))


def _filled(tree: PyTree, like: PyTree) -> PyTree:
    """`tree` with zeros in place of None."""
    leaves, structure = jax.tree.flatten(like)
    given = at_leaves_of(like, tree)
    full = [jnp.zeros_like(x) if g is None else g for g, x in zip(given, leaves, strict=True)]
    return jax.tree.unflatten(structure, full)


def _sum(parts: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *x: functools.reduce(jnp.add, x), *parts)


def _named(rule: DerivativeRule, results: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    """Outputs and residuals under the names that `jax.checkpoint` policies know them by."""
    known: dict[int, Any] = {}

    def named(path: KeyPath, x: jax.Array) -> jax.Array:
        field = getattr(path[-1], "name", "residual")
        if id(x) not in known:  # an output is often a residual too, and saved once
            known[id(x)] = checkpoint_name(x, f"{rule.op.name}_{field}")
        return known[id(x)]

    return jax.tree_util.tree_map_with_path(named, results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _without_letters(passes: Passes, inputs: CallInputs) -> PyTree:
    return passes.value(inputs)


def _forward_without_letters(
    passes: Passes, inputs: CallInputs
) -> tuple[PyTree, tuple[CallInputs, PyTree]]:
    outputs, residuals = passes.forward(inputs)
    return outputs, (inputs, residuals)


def _backward_without_letters(
    passes: Passes, saved: tuple[CallInputs, PyTree], d_outputs: PyTree
) -> tuple[PyTree]:
    gradients = passes.backward(*saved, d_outputs)
    return (jax.tree.map(summed_over_devices, gradients, saved[0], is_leaf=lambda x: x is None),)


_without_letters.defvjp(_forward_without_letters, _backward_without_letters)
