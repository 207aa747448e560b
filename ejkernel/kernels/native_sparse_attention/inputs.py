"""What a call of native sparse attention carries below its API."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ejkernel.kernels.common.sampling import unknown


class Inputs(NamedTuple):
    """The arrays of a call; gradients and partition specs come in the same shape.

    Attributes:
        block_indices: for every token and key head its blocks, counted from the start of the
            token's sequence; entries that are none of its blocks, -1 among them, count for nothing.
        cu_seqlens: where the sequences packed into every row begin, and where the last one ends.
        traced_window: stands for `Spec.sliding_window` where that is known only at run time.
        query_start: where the queries begin among the keys, if there are fewer of them.
    """

    query: Float[Array, "b t n h"]
    key: Float[Array, "b t k h"]
    value: Float[Array, "b t k v"]
    block_indices: Int[Array, "b t k c"]
    g_cmp: Float[Array, "b t n"] | None = None
    g_slc: Float[Array, "b t n"] | None = None
    g_swa: Float[Array, "b t n"] | None = None
    cu_seqlens: Int[Array, "u"] | None = None
    traced_window: Int[Array, "#b"] | None = None
    query_start: Int[Array, ""] | None = None


class Outputs(NamedTuple):
    """The result of a call, in the dtype of the query."""

    out: Float[Array, "b t n v"]


class Branch(NamedTuple):
    """One branch before its gate; `lse` is -inf for a row that sees nothing."""

    out: Float[Array, "b t n v"]
    lse: Float[Array, "b n t"]


class Residuals(NamedTuple):
    """What the backward pass needs: the branches that the call has."""

    selected: Branch
    compressed: Branch | None
    windowed: Branch | None


class SelectionInputs(NamedTuple):
    """The arrays of a call that chooses the blocks of each token.

    Attributes:
        query: with an axis for the query heads of a key head, which choose together.
        places: one number for each block to choose; only its length counts.
        query_start: as in `Inputs`.
    """

    query: Float[Array, "b t k g h"]
    key: Float[Array, "b t k h"]
    places: Int[Array, "c"]
    cu_seqlens: Int[Array, "u"] | None = None
    query_start: Int[Array, ""] | None = None


class Selection(NamedTuple):
    """The blocks of each token, -1 where there is none."""

    blocks: Int[Array, "b t k c"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The static arguments of a call."""

    softmax_scale: float
    block_size: int
    sliding_window: int | None = None


def sample(inputs: Inputs, drawn: Inputs, spec: Spec) -> Inputs:
    """Data to tune on: where the blocks are not known yet, each token takes some of its past."""
    bounds = inputs.cu_seqlens
    if bounds is not None and unknown(bounds):
        even = jnp.linspace(0, inputs.query.shape[1], bounds.shape[0])
        drawn = drawn._replace(cu_seqlens=even.astype(bounds.dtype))
    if inputs.traced_window is not None and unknown(inputs.traced_window):
        whole = jnp.full(inputs.traced_window.shape, inputs.query.shape[1], jnp.int32)
        drawn = drawn._replace(traced_window=whole)
    if unknown(inputs.block_indices):
        shape = inputs.block_indices.shape
        own = jnp.arange(shape[1], dtype=jnp.int32)[:, None, None] // spec.block_size
        chosen = jax.random.randint(jax.random.key(2), shape, 0, 1 << 30) % (own + 1)
        drawn = drawn._replace(block_indices=chosen.at[..., :1].set(own[None]))
    return drawn
