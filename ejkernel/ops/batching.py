"""One vmap rule for every op: the mapped axis joins the batch axis, or the calls run one by one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef
from jaxtyping import PyTree

from ejkernel.ops import axes


def batched(
    call: Callable[..., Any],
    run: Callable[..., Any],
    trees: tuple[PyTree, ...],
    mapped: list[bool],
    axis_size: int,
) -> Any:
    """`vmap` of `call` over the first axis of the leaves that are mapped; results have it first.

    `run` computes the same as `call` and tells the shapes of its results.
    """
    leaves, treedef = jax.tree.flatten(trees)
    if not axis_size:  # of no calls at all
        results = jax.eval_shape(run, *_one_call(leaves, mapped, treedef)[0])
        return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), results)
    if _lifts(leaves, mapped, treedef) and _carries_batch(run, trees, axis_size):
        return call(*trees)
    folded, rows = _fold(leaves, mapped, treedef, axis_size)
    if folded is None or not (
        _carries_batch(run, folded, rows)
        and _carries_batch(run, _one_call(leaves, mapped, treedef)[0], rows // axis_size)
    ):
        return _one_by_one(call, leaves, mapped, treedef)
    return jax.tree.map(
        lambda x: x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]), call(*folded)
    )


def _lifts(leaves: list[Any], mapped: list[bool], treedef: PyTreeDef) -> bool:
    """Whether the mapped axis can be the batch axis itself, of a call that has none so far.

    Then every mapped argument has a second form that begins with one, and the call needs no copy.
    """
    _, alone = _one_call(leaves, mapped, treedef)
    together = axes.of_leaves(jax.tree.unflatten(treedef, leaves))
    return not any(map(axes.leads, alone)) and all(
        axes.leads(letter) for letter, is_mapped in zip(together, mapped, strict=True) if is_mapped
    )


def _one_call(
    leaves: list[Any], mapped: list[bool], treedef: PyTreeDef
) -> tuple[PyTree[jax.ShapeDtypeStruct], list[tuple[str, ...] | None]]:
    """One of the mapped calls as shapes, and the letters of its leaves."""
    shapes = [
        jax.ShapeDtypeStruct(x.shape[1:] if is_mapped else x.shape, x.dtype)
        for x, is_mapped in zip(leaves, mapped, strict=True)
    ]
    example = jax.tree.unflatten(treedef, shapes)
    return example, axes.of_leaves(example)


def _fold(
    leaves: list[Any], mapped: list[bool], treedef: PyTreeDef, axis_size: int
) -> tuple[PyTree, int]:
    """The arguments with the mapped axis inside the batch axis, and the rows that makes.

    None when a mapped argument has no batch axis.
    """
    example, letters = _one_call(leaves, mapped, treedef)
    sizes = [
        x.shape[0]
        for x, letter in zip(jax.tree.leaves(example), letters, strict=True)
        if axes.leads(letter)
    ]
    if not sizes:
        return None, 0
    batch, folded = max(sizes), []
    for x, is_mapped, letter in zip(leaves, mapped, letters, strict=True):
        if letter is None or not axes.leads(letter):
            if is_mapped:
                return None, 0
        elif is_mapped:
            x = jnp.broadcast_to(x, (axis_size, batch, *x.shape[2:]))
            x = x.reshape(axis_size * batch, *x.shape[2:])
        elif x.shape[0] == batch and (batch > 1 or letter[0] == "b"):
            x = jnp.broadcast_to(x, (axis_size, *x.shape)).reshape(-1, *x.shape[1:])
        folded.append(x)  # an axis "#b" of size 1 still belongs to every row
    return jax.tree.unflatten(treedef, folded), axis_size * batch


def _carries_batch(run: Callable[..., PyTree], folded: PyTree, rows: int) -> bool:
    """Whether every result keeps these rows apart (a summed gradient does not)."""
    results = jax.eval_shape(run, *folded)
    return all(
        axes.leads(letter) and x.shape[0] == rows
        for x, letter in zip(jax.tree.leaves(results), axes.of_leaves(results), strict=True)
    )


def _one_by_one(
    call: Callable[..., PyTree], leaves: list[Any], mapped: list[bool], treedef: PyTreeDef
) -> PyTree:
    def one(slices: list[Any]) -> PyTree:
        rest = iter(slices)
        merged = [
            next(rest) if is_mapped else x for x, is_mapped in zip(leaves, mapped, strict=True)
        ]
        return call(*jax.tree.unflatten(treedef, merged))

    return jax.lax.map(one, [x for x, is_mapped in zip(leaves, mapped, strict=True) if is_mapped])
