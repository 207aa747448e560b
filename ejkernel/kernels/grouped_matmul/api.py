"""The call: what it takes, what it means, how it becomes `Inputs` and `Spec`."""

import dataclasses
from typing import ClassVar, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from ejkernel.kernels.common.arguments import (
    Specs,
    as_array,
    as_specs,
    check_floating,
    integer_array,
    known_values,
)
from ejkernel.kernels.grouped_matmul import OP
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import (
    Inputs,
    Spec,
    TransposedInputs,
    has_weight,
    ids_of_sizes,
    partial_spec,
)
from ejkernel.ops import executor, sharded
from ejkernel.ops.executor import Request
from ejkernel.ops.meshes import surrounding_mesh
from ejkernel.ops.module import BoundFunction, Module, operation
from ejkernel.types.rule_arrays import bounded


@operation
def grouped_matmul(
    inputs: ArrayLike,
    weights: ArrayLike,
    group_ids: ArrayLike | None = None,
    group_offset: int | ArrayLike | None = None,
    existing_out: ArrayLike | None = None,
    *,
    group_sizes: ArrayLike | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    platform: str | None = None,
    cfg: GroupedMatmulConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array:
    """Multiply every row by the weight of its group: the matmul of a mixture of experts.

        output[t] = inputs[t] @ weights[group_ids[t] - group_offset]

    A row whose group has no weight here (its id is out of range, it comes after the last group, or
    the group belongs to another shard) is the row of `existing_out`, or 0 without it. The work is
    that of one matmul with all rows, whatever the number of groups; products are accumulated in
    float32 or wider.

    Args:
        inputs: `[rows, k]`.
        weights: `[groups, k, n]`, in the dtype of the inputs; a group may have no rows.
        group_ids: `[rows]` integers, the group of each row, in any order.
        group_offset: the group of the first weight, an int or a scalar array, by default 0. Ids
            count, and sizes describe, all the groups there are; `weights` holds those from
            `group_offset` on.
        existing_out: `[rows, n]` in the dtype of the output: where a row has no weight here, its
            row of this array is the result, and the gradient of that row goes to it.
        group_sizes: `[groups]` integers instead of ids, for rows sorted by group: the
            first `group_sizes[0]` rows belong to group 0, the next to group 1, and so on.
        transpose_rhs: the weights are `[groups, n, k]`.
        preferred_element_type: dtype of the output, by default that of the inputs.
        platform: "xla", "pallas", "triton", or None for the best that supports the call.
        cfg: tiles and launch parameters; by default chosen for the call.
        mesh: run under `shard_map` over this mesh.
        in_specs: with `mesh`, the specs of inputs, weights and group_ids (or group_sizes). Split
            weights, `P("experts")`, give each shard its own groups, and the results are summed.
        out_specs: the spec of the output; it follows from `in_specs`.

    Returns:
        `[rows, n]`, rows in the order of the inputs.

    Raises:
        ValueError: the arguments do not fit each other.
        UnsupportedError: the requested platform does not support the call.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import grouped_matmul
    >>> tokens = jnp.array([[1.0], [2.0], [3.0]])
    >>> weights = jnp.array([[[10.0]], [[100.0]]])
    >>> grouped_matmul(tokens, weights, jnp.array([1, 0, 1])).tolist()
    [[100.0], [20.0], [300.0]]
    """
    rows, weights = _matrices(inputs, weights, transpose_rhs)
    kind = TransposedInputs if transpose_rhs else Inputs
    count, columns = rows.shape[0], weights.shape[1 if transpose_rhs else 2]
    call = kind(
        rows,
        weights,
        group_ids=_ids(group_ids, group_sizes, count),
        group_sizes=_sizes(group_sizes, group_offset, count, weights.shape[0]),
        groups=_groups(group_offset, weights.shape[0]),
    )
    spec = Spec(
        transpose_rhs=bool(transpose_rhs),
        preferred_element_type=_dtype(preferred_element_type, rows.dtype),
    )
    existing = _existing(existing_out, (count, columns), spec.output_dtype(call))
    if 0 in (*rows.shape, *weights.shape):
        return _filled(jnp.zeros((count, columns), spec.output_dtype(call)), call, existing)
    if in_specs is not None:
        mesh = mesh or surrounding_mesh()
    request = Request(platform, cfg, mesh, in_specs, out_specs)
    if mesh is not None:
        return _over_mesh(call, spec, existing, as_specs(in_specs), request)
    dtype = spec.output_dtype(call)
    found = sharded.from_types([rows, weights])
    if found is not None and _splits_inner(call, found[1].specs):
        spec = partial_spec(call, spec, frozenset("k"))
    out = executor.run(OP, call._replace(existing_out=existing), spec, request).out
    return out.astype(dtype)


def _over_mesh(
    call: Inputs, spec: Spec, existing: jax.Array | None, specs: Specs, request: Request
) -> jax.Array:
    """The call split over a mesh, with explicit group numbers so that each shard knows its own.

    `existing_out` is added after the sum over shards, which would otherwise count it several times.
    Partial sums over k stay in float32 until they are added.
    """
    dtype = spec.output_dtype(call)
    if call.groups is None:
        call = call._replace(groups=np.arange(call.weights.shape[0], dtype=np.int32))
    if call.group_sizes is not None:
        ids = ids_of_sizes(call.group_sizes, call.inputs.shape[0])
        call = call._replace(group_ids=ids, group_sizes=None)
        specs = _specs_of_ids(specs)
    if _splits_inner(call, specs):
        spec = partial_spec(call, spec, frozenset("k"))
    out = executor.run(OP, call, spec, dataclasses.replace(request, in_specs=specs)).out
    return _filled(out.astype(dtype), call, existing)


def _specs_of_ids(specs: Specs) -> Specs:
    """The specs of a call with `group_ids`, from those of a call with `group_sizes`."""
    if not isinstance(specs, tuple) or len(specs) < 3:
        return specs
    if any(entry is not None for entry in specs[2] or ()):
        raise ValueError(
            f"grouped_matmul: group_sizes cannot be split over a mesh, got {specs[2]}."
        )
    return (*specs[:2], PartitionSpec(*tuple(specs[0] or ())[:1]), *specs[3:])


def _splits_inner(call: Inputs, specs: Specs) -> bool:
    """Whether the sum over k is split over shards."""
    inner = 1, 2 if isinstance(call, TransposedInputs) else 1
    pairs = zip(specs, inner, strict=False) if isinstance(specs, tuple) else ()
    return any(any(tuple(spec or ())[axis : axis + 1]) for spec, axis in pairs)


def _filled(out: jax.Array, call: Inputs, existing: jax.Array | None) -> jax.Array:
    """The result, with the existing rows where a row has no weight."""
    return out if existing is None else jnp.where(has_weight(call)[:, None], out, existing)


def _matrices(
    inputs: ArrayLike, weights: ArrayLike, transposed: bool
) -> tuple[jax.Array, jax.Array]:
    inputs = as_array("grouped_matmul", "inputs", inputs)
    weights = as_array("grouped_matmul", "weights", weights)
    shape = "[groups, n, k]" if transposed else "[groups, k, n]"
    if inputs.ndim != 2 or weights.ndim != 3:
        raise ValueError(
            f"grouped_matmul: inputs must be [rows, k] and weights {shape}, "
            f"got {inputs.shape} and {weights.shape}."
        )
    if inputs.shape[1] != weights.shape[2 if transposed else 1]:
        raise ValueError(
            f"grouped_matmul: the k of inputs [rows, k] and weights {shape} must be one, "
            f"got {inputs.shape} and {weights.shape}."
        )
    check_floating("grouped_matmul", "inputs", inputs.dtype)
    if inputs.dtype != weights.dtype:
        raise ValueError(
            "grouped_matmul: inputs and weights must have one dtype, "
            f"got {inputs.dtype} and {weights.dtype}."
        )
    return inputs, weights


def _ids(ids: ArrayLike | None, sizes: ArrayLike | None, rows: int) -> jax.Array | None:
    if (ids is None) == (sizes is None):
        raise ValueError(
            "grouped_matmul: give either group_ids, one for each row, or group_sizes, "
            f"got {'neither' if ids is None else 'both'}."
        )
    if ids is None:
        return None
    ids = integer_array("grouped_matmul", "group_ids", ids)
    if ids.ndim != 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"grouped_matmul: group_ids must be integers [rows], got {ids.dtype}{list(ids.shape)}."
        )
    if ids.shape[0] != rows:
        raise ValueError(
            f"grouped_matmul: group_ids must have one entry for each of {rows} rows, got "
            f"{ids.shape[0]}; for the number of rows in each group use group_sizes=."
        )
    return ids


def _sizes(
    sizes: ArrayLike | None, offset: ArrayLike | None, rows: int, weights: int
) -> jax.Array | None:
    if sizes is None:
        return None
    values, sizes = known_values(sizes), integer_array("grouped_matmul", "group_sizes", sizes)
    if sizes.ndim != 1 or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(
            "grouped_matmul: group_sizes must be integers [groups], "
            f"got {sizes.dtype}{list(sizes.shape)}."
        )
    first = _known_offset(offset)
    fits = sizes.shape[0] == weights if offset is None else sizes.shape[0] >= first + weights
    if not fits:
        whose = f"{weights} weights" if offset is None else f"{weights} weights from {first} on"
        raise ValueError(
            f"grouped_matmul: group_sizes has {sizes.shape[0]} groups for {whose}; "
            "a part of the groups needs group_offset."
        )
    if values is not None and (values < 0).any():
        raise ValueError(f"grouped_matmul: group_sizes must not be negative, got {values.min()}.")
    if values is not None and values.sum() > rows:
        raise ValueError(
            f"grouped_matmul: group_sizes sum to {values.sum()}, past the {rows} rows."
        )
    return sizes


def _known_offset(offset: ArrayLike | None) -> int:
    """The offset if its value is known while tracing, else 0, the least that it can be."""
    value = None if offset is None else known_values(offset)
    return 0 if value is None or value.size != 1 else int(value.reshape(()))


def _groups(offset: ArrayLike | None, weights: int) -> jax.Array | np.ndarray | None:
    """The number of the group of each weight; None where they count from 0."""
    if offset is None:
        return None
    if _known_offset(offset) < 0:
        raise ValueError(
            f"grouped_matmul: group_offset must not be negative, got {_known_offset(offset)}."
        )
    index = np.arange(weights, dtype=np.int32)
    if isinstance(offset, int | np.integer) and not isinstance(offset, bool):
        return index + np.int32(bounded(int(offset)))
    offset = integer_array("grouped_matmul", "group_offset", offset)
    if offset.shape not in ((), (1,)) or not jnp.issubdtype(offset.dtype, jnp.integer):
        raise ValueError(
            "grouped_matmul: group_offset must be one integer, "
            f"got {offset.dtype}{list(offset.shape)}."
        )
    return index + bounded(offset)


def _dtype(preferred: DTypeLike | None, given: np.dtype) -> str | None:
    """The name of another dtype than that of the inputs, else None."""
    if preferred is None:
        return None
    try:
        dtype = jnp.dtype(preferred)
    except TypeError:
        raise ValueError(
            f"grouped_matmul: preferred_element_type must be a dtype, got {preferred!r}."
        ) from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"grouped_matmul: preferred_element_type must be floating point, got {dtype}."
        )
    return None if dtype == given else str(dtype)


def _existing(
    existing: ArrayLike | None, shape: tuple[int, int], dtype: np.dtype
) -> jax.Array | None:
    if existing is None:
        return None
    existing = as_array("grouped_matmul", "existing_out", existing)
    if existing.shape != shape or existing.dtype != dtype:
        raise ValueError(
            f"grouped_matmul: existing_out must be like the output, {dtype}{list(shape)}, "
            f"got {existing.dtype}{list(existing.shape)}."
        )
    return existing


class GroupedMatmul(Module):
    """Grouped matmul as an object; see `grouped_matmul`."""

    __call__: Final = BoundFunction(grouped_matmul)
    config: ClassVar[type[GroupedMatmulConfig]] = GroupedMatmulConfig
