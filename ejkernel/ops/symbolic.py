"""Calls with symbolic sizes, as `jax.export` makes them: one program for every batch and length.

XLA's passes are made for known lengths. If only the batch is symbolic, they run for one row after
another, with the memory of one row. If a length is symbolic, the call is its definition, the
reference, whose memory grows with the product of the lengths.
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ejkernel.errors import UnsupportedError
from ejkernel.ops import axes
from ejkernel.ops.implementation import CallInputs, CallSpec, Op

_STAND_IN = 16  # a size for letters that have none, to find dtypes by


def has_symbolic_sizes(leaves: list[Any]) -> bool:
    """Whether a size of one of these arrays is not known."""
    return any(not isinstance(size, int) for x in leaves for size in x.shape)


def run(
    op: Op,
    inputs: CallInputs,
    spec: CallSpec,
    platform: str | None,
    by_xla: Callable[[CallInputs], PyTree],
) -> PyTree:
    """The outputs of a call some of whose sizes are symbolic; `by_xla` runs it for known ones."""
    if platform not in (None, "auto", "xla"):
        raise UnsupportedError(
            f"{op.name}: platform={platform!r} does not support symbolic sizes; "
            "platform='xla' does."
        )
    leaves, treedef = jax.tree.flatten(inputs)
    letters = axes.of_leaves(inputs)
    rows = [
        axes.leads(letter) and not isinstance(x.shape[0], int)
        for x, letter in zip(leaves, letters, strict=True)
    ]
    if all(_known(x.shape[1:] if row else x.shape) for x, row in zip(leaves, rows, strict=True)):
        return _row_by_row(by_xla, leaves, rows, treedef)
    if op.reference is None:
        raise UnsupportedError(
            f"{op.name}: a user's kernel does not support these symbolic sizes; export with fixed "
            "sizes."
        )
    return _by_definition(op, inputs, spec, by_xla)


def _known(shape: tuple[Any, ...]) -> bool:
    return all(isinstance(size, int) for size in shape)


def _row_by_row(
    by_xla: Callable[[CallInputs], PyTree],
    leaves: list[Any],
    rows: list[bool],
    treedef: jax.tree_util.PyTreeDef,
) -> PyTree:
    def one(slices: list[Any]) -> PyTree:
        rest = iter(slices)
        merged = [next(rest)[None] if row else x for x, row in zip(leaves, rows, strict=True)]
        return jax.tree.map(lambda x: x[0], by_xla(jax.tree.unflatten(treedef, merged)))

    return jax.lax.map(one, [x for x, row in zip(leaves, rows, strict=True) if row])


def _by_definition(
    op: Op, inputs: CallInputs, spec: CallSpec, by_xla: Callable[[CallInputs], PyTree]
) -> PyTree:
    reference = importlib.import_module(str(op.reference))
    widened = jax.tree.map(
        lambda x: (
            x.astype(jnp.promote_types(x.dtype, jnp.float32))
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
        ),
        inputs,
    )
    outputs = reference.forward(widened, spec)
    dtypes = jax.eval_shape(by_xla, jax.tree.map(_stand_in, inputs))
    return jax.tree.map(lambda x, like: x.astype(like.dtype), outputs, dtypes)


def _stand_in(x: Any) -> jax.ShapeDtypeStruct:
    shape = [size if isinstance(size, int) else _STAND_IN for size in x.shape]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)
