"""What a call of grouped matmul carries below its API: arrays, static arguments, results.

Letters: `r` rows, `k` columns of the inputs, `n` columns of the output, `e` weights, `g` groups (as
many as weights, or more where other shards have the rest). Under vmap with shared weights the other
arrays have a batch axis `b`; those that are not mapped have none.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ejkernel.kernels.common.sampling import unknown

# Arguments beyond the plain call that every accelerator kernel of this op supports.
KERNEL_FEATURES = frozenset(
    {
        "existing_out",
        "group_ids",
        "group_sizes",
        "groups",
        "preferred_element_type",
        "transpose_rhs",
    }
)


class Inputs(NamedTuple):
    """The arrays of a call; gradients and partition specs come in the same shape.

    Attributes:
        group_ids: the group of each row; either it or `group_sizes` is given.
        group_sizes: the number of rows of each group; rows are sorted by group.
        groups: the group that each weight belongs to, consecutive numbers; None: from 0.
        existing_out: the rows of the result whose group has no weight here; None: zeros.
    """

    inputs: Float[Array, "r k"] | Float[Array, "b r k"]
    weights: Float[Array, "e k n"]
    group_ids: Int[Array, "r"] | Int[Array, "b r"] | None = None
    group_sizes: Int[Array, "g"] | Int[Array, "b g"] | None = None
    groups: Int[Array, "e"] | Int[np.ndarray, "e"] | None = None
    existing_out: Float[Array, "r n"] | Float[Array, "b r n"] | None = None


class TransposedInputs(Inputs):
    """The arrays of a call with `transpose_rhs`."""

    weights: Float[Array, "e n k"]


class Outputs(NamedTuple):
    """The result of a call."""

    out: Float[Array, "r n"] | Float[Array, "b r n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The static arguments of a call; the dtype of the output is that of the inputs if None."""

    transpose_rhs: bool = False
    preferred_element_type: str | None = None

    def output_dtype(self, inputs: Inputs) -> np.dtype:
        return jnp.dtype(self.preferred_element_type or inputs.inputs.dtype)


def unsplittable(inputs: Inputs) -> frozenset[str]:
    """Rows need ids to be split; what some rows have already would be summed several times."""
    rows = frozenset() if inputs.group_sizes is None else frozenset("r")
    return rows if inputs.existing_out is None else rows | frozenset("ek")


def share(inputs: Inputs, starts: Mapping[str, jax.Array]) -> Inputs:
    """The inputs of one device: it has the weights of its own groups."""
    if inputs.groups is not None or "e" not in starts:
        return inputs
    groups = starts["e"] + jnp.arange(inputs.weights.shape[0], dtype=jnp.int32)
    return inputs._replace(groups=groups)


def partial_spec(inputs: Inputs, spec: Spec, letters: frozenset[str]) -> Spec:
    """Sums over a part of `k` are float32; over groups only one shard has a result for a row."""
    if "k" not in letters:
        return spec
    wide = jnp.promote_types(inputs.inputs.dtype, jnp.float32)
    wide = jnp.promote_types(wide, spec.output_dtype(inputs))
    return dataclasses.replace(spec, preferred_element_type=str(wide))


def local_ids(inputs: Inputs) -> Int[Array, "*rows"]:
    """The index of each row's weight, or the number of weights for a row that has none."""
    rows, weights = inputs.inputs.shape[-2], inputs.weights.shape[0]
    ids = inputs.group_ids
    if ids is None:
        ids = ids_of_sizes(jnp.asarray(inputs.group_sizes), rows)
    first = 0 if inputs.groups is None else jnp.asarray(inputs.groups)[0]
    local = jnp.where(ids < 0, -1, ids - first)
    return jnp.where((local < 0) | (local >= weights), weights, local).astype(jnp.int32)


def rows_per_weight(inputs: Inputs) -> float:
    """How many rows a weight has on average."""
    shape = inputs.inputs.shape
    rows = shape[-2] * (shape[0] if len(shape) == 3 else 1)
    return rows / max(1, inputs.weights.shape[0])


def has_weight(inputs: Inputs) -> Bool[Array, "*rows"]:
    """Which rows of the result come from a weight."""
    return local_ids(inputs) < inputs.weights.shape[0]


def ids_of_sizes(sizes: Int[Array, "*b g"], rows: int) -> Int[Array, "*b r"]:
    """The group of each row; -1 past the last group."""
    find = jnp.vectorize(
        lambda ends: jnp.searchsorted(ends, jnp.arange(rows, dtype=ends.dtype), side="right"),
        signature="(g)->(r)",
    )
    ids = find(jnp.cumsum(sizes, axis=-1, dtype=sizes.dtype))
    return jnp.where(ids < sizes.shape[-1], ids, -1)


def sample(inputs: Inputs, drawn: Inputs, spec: Spec) -> Inputs:
    """Data to tune on: where the groups are traced, the rows are divided among them evenly."""
    rows, weights = inputs.inputs.shape[-2], inputs.weights.shape[0]
    found: dict[str, jax.Array] = {}
    if _shape_if_traced(inputs.groups) is not None:
        found["groups"] = jnp.arange(weights, dtype=jnp.int32)
    if (shape := _shape_if_traced(inputs.group_ids)) is not None:
        found["group_ids"] = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32) % weights, shape)
    if (shape := _shape_if_traced(inputs.group_sizes)) is not None:
        found["group_sizes"] = jnp.full(shape, rows // shape[-1], jnp.int32)
    known = {name: x.astype(getattr(inputs, name).dtype) for name, x in found.items()}
    return drawn._replace(**known)


def _shape_if_traced(
    x: jax.Array | np.ndarray | jax.ShapeDtypeStruct | None,
) -> tuple[int, ...] | None:
    """The shape of an array whose values are not known while tracing, else None."""
    return None if x is None or not unknown(x) else x.shape
