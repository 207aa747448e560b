"""The call: what it takes, what it means, how it becomes `Inputs` and `Spec`."""

from typing import ClassVar, Final

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import (
    Specs,
    as_array,
    as_specs,
    check_floating,
    cumulative_lengths,
)
from ejkernel.kernels.mean_pooling import OP
from ejkernel.kernels.mean_pooling.config import MeanPoolingConfig
from ejkernel.kernels.mean_pooling.inputs import Inputs, Spec
from ejkernel.ops import executor
from ejkernel.ops.executor import Request
from ejkernel.ops.module import BoundFunction, Module, operation
from ejkernel.types.arguments import boolean


@operation
def mean_pooling(
    x: ArrayLike,
    attention_mask: ArrayLike | None = None,
    *,
    cu_seqlens: ArrayLike | None = None,
    platform: str | None = None,
    cfg: MeanPoolingConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array:
    """The mean of the valid tokens of every sequence.

        output[b] = sum over valid t of x[b, t] / number of valid t

    A sequence of no valid token gives 0. Invalid tokens are ignored, even if they are NaN. Sums are
    accumulated in float32 or wider.

    Args:
        x: `[batch, length, hidden]`, a sequence in every row; with `cu_seqlens` packed sequences,
            `[tokens, hidden]` or `[1, tokens, hidden]`.
        attention_mask: `[batch, length]`, boolean or integer, True or nonzero where a token is
            valid; by default all are.
        cu_seqlens: `[0, l1, l1 + l2, ...]`: where the packed sequences begin and end. Tokens past
            the last sequence are ignored.
        platform: "xla", "triton", or None for the best that supports the call.
        cfg: blocks and launch parameters; by default chosen for the call.
        mesh: run under `shard_map` over this mesh; batch and hidden may be split.
        in_specs: with `mesh`, the spec of x, and if wanted that of attention_mask.
        out_specs: the spec of the output; it follows from `in_specs`.

    Returns:
        `[batch, hidden]`, or `[sequences, hidden]` with `cu_seqlens`, in the dtype of `x`.

    Raises:
        ValueError: the arguments do not fit each other.
        UnsupportedError: the requested platform does not support the call.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import mean_pooling
    >>> x = jnp.array([[[1.0], [3.0], [8.0]]])
    >>> mean_pooling(x, jnp.array([[1, 1, 0]])).tolist()
    [[2.0]]
    >>> mean_pooling(x, cu_seqlens=jnp.array([0, 1, 3])).tolist()
    [[1.0], [5.5]]
    """
    x = as_array("mean_pooling", "x", x)
    check_floating("mean_pooling", "x", x.dtype)
    specs, result_specs = as_specs(in_specs), as_specs(out_specs)
    if cu_seqlens is None:
        inputs = _padded(x, attention_mask)
        result_specs = _with_sequence_axis(result_specs)
    else:
        inputs, specs = _packed(x, attention_mask, cu_seqlens, specs)
    request = Request(platform, cfg, mesh, specs, result_specs)
    if 0 in x.shape:
        sequences = x.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
        return jnp.zeros((sequences, x.shape[-1]), x.dtype)
    out = executor.run(OP, inputs, Spec(), request).out
    return out[:, 0] if cu_seqlens is None else out


def _with_sequence_axis(specs: Specs) -> Specs:
    """The specs of a result that has an axis for the sequences of a row, here of size 1."""
    if isinstance(specs, PartitionSpec):
        return _with_axis(specs)
    return tuple(map(_with_axis, specs)) if isinstance(specs, tuple) else specs


def _with_axis(spec: PartitionSpec | None) -> PartitionSpec | None:
    return spec and PartitionSpec(*tuple(spec)[:1], None, *tuple(spec)[1:])


def _padded(x: jax.Array, mask: ArrayLike | None) -> Inputs:
    """A sequence in every row."""
    if x.ndim != 3:
        raise ValueError(
            f"mean_pooling: x must be [batch, length, hidden], got {x.shape}; "
            "packed tokens [tokens, hidden] need cu_seqlens=."
        )
    if mask is None:
        return Inputs(x)
    mask = as_array("mean_pooling", "attention_mask", mask)
    if mask.shape != x.shape[:2]:
        hint = "; for cumulative lengths use cu_seqlens=" if mask.ndim == 1 else ""
        raise ValueError(
            f"mean_pooling: attention_mask must be [batch, length] = {list(x.shape[:2])}, "
            f"got {list(mask.shape)}{hint}."
        )
    return Inputs(x, boolean("mean_pooling: attention_mask", mask))


def _packed(
    x: jax.Array, mask: ArrayLike | None, cu_seqlens: ArrayLike, specs: Specs
) -> tuple[Inputs, Specs]:
    """Packed sequences without a batch axis, and the specs to match."""
    if mask is not None:
        raise ValueError(
            "mean_pooling: give attention_mask for padded rows or cu_seqlens for packed tokens, "
            "not both."
        )
    if x.ndim != 2 and (x.ndim != 3 or x.shape[0] != 1):
        raise ValueError(
            "mean_pooling: with cu_seqlens x must be [tokens, hidden] or [1, tokens, hidden], "
            f"got {x.shape}."
        )
    cu_seqlens = cumulative_lengths("mean_pooling", "cu_seqlens", cu_seqlens, x.shape[-2])
    if x.ndim == 3:
        x = x.reshape(x.shape[1:])
        if isinstance(specs, tuple) and isinstance(specs[0], PartitionSpec):
            specs = (PartitionSpec(*tuple(specs[0])[1:]), *specs[1:])
    return Inputs(x, cu_seqlens=cu_seqlens), specs


class MeanPooling(Module):
    """Mean pooling as an object; see `mean_pooling`."""

    __call__: Final = BoundFunction(mean_pooling)
    config: ClassVar[type[MeanPoolingConfig]] = MeanPoolingConfig
