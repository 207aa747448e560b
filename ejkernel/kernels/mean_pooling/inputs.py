"""What a call of mean pooling carries below its API: arrays, static arguments, results.

Letters: `s` tokens, `d` columns, `q` sequences in a row, `c` their boundaries. Padded rows have one
sequence each; packed rows have no `b`, unless vmap joins several.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ejkernel.kernels.common.sampling import unknown


class Inputs(NamedTuple):
    """The arrays of a call; gradients and partition specs come in the same shape.

    Attributes:
        attention_mask: the tokens that count; None: all of them.
        cu_seqlens: where each of the packed sequences begins, and where the last one ends; None: a
            row is one sequence.
    """

    x: Float[Array, "b s d"] | Float[Array, "s d"]
    attention_mask: Bool[Array, "b s"] | None = None
    cu_seqlens: Int[Array, "c"] | Int[Array, "b c"] | None = None


class Outputs(NamedTuple):
    """The means, in the dtype of `x`; 0 for a sequence of no tokens."""

    out: Float[Array, "q d"] | Float[Array, "b q d"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """Mean pooling has no static arguments."""


def sample(inputs: Inputs, drawn: Inputs, spec: Spec) -> Inputs:
    """Data to tune on: where `cu_seqlens` is traced, the sequences have equal lengths."""
    cu_seqlens = inputs.cu_seqlens
    if cu_seqlens is None or not unknown(cu_seqlens):
        return drawn
    ends = jnp.linspace(0, inputs.x.shape[-2], cu_seqlens.shape[-1]).astype(cu_seqlens.dtype)
    return drawn._replace(cu_seqlens=jnp.broadcast_to(ends, cu_seqlens.shape))
