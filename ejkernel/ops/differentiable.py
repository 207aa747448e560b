"""One `custom_vjp` for every op: any forward with any backward, each chosen on its own."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ejkernel.ops import batching
from ejkernel.ops.implementation import CallInputs
from ejkernel.ops.meshes import varying_axes


class Rule(NamedTuple):
    """A call whose forward is chosen; its backward is chosen when somebody differentiates."""

    value: Callable[[CallInputs], Any]  # inputs -> outputs
    forward: Callable[[CallInputs], tuple[Any, Any]]  # inputs -> (outputs, residuals)
    backward: Callable[
        [CallInputs, PyTree, PyTree], PyTree
    ]  # inputs, residuals, d_outputs -> d_inputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply(rule: Rule, inputs: CallInputs) -> Any:
    """The value of the rule; under differentiation its forward and backward."""
    return batching.over_batch(rule.value, inputs)


def _forward(rule: Rule, inputs: CallInputs) -> tuple[PyTree, tuple[CallInputs, PyTree]]:
    outputs, residuals = batching.over_batch(rule.forward, inputs)
    return outputs, (inputs, residuals)


def _backward(rule: Rule, saved: tuple[CallInputs, PyTree], d_outputs: PyTree) -> tuple[PyTree]:
    inputs, residuals = saved
    gradients = batching.over_batch(rule.backward, inputs, residuals, d_outputs)
    return (jax.tree.map(_summed, gradients, inputs, is_leaf=lambda x: x is None),)


def _summed(gradient: ArrayLike | None, primal: PyTree) -> ArrayLike | None:
    """The gradient of an array that devices share is the sum of what each of them finds."""
    if gradient is None:
        return None
    shared = varying_axes(gradient) - varying_axes(primal)
    return jax.lax.psum(gradient, tuple(sorted(shared))) if shared else gradient


apply.defvjp(_forward, _backward)
