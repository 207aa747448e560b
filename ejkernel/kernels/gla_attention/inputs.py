"""What a call of gated linear attention carries below its API: arrays, static arguments, results.

Letters beyond the usual: of a row of packed sequences `m` sequences and `c` their boundaries. A row
that is one sequence has `m` = 1. Query and key have the same tokens, `s`.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ejkernel.kernels.common.sampling import unknown


class Inputs(NamedTuple):
    """The arrays of a call; gradients and partition specs come in the same shape.

    Attributes:
        gate: logarithms of the decay of each row of the state, or of all of them (size 1).
        g_gamma: the same for every token of a head.
        gv: logarithms of the decay of each column of the state.
        initial_state: the state before the first token of every sequence; None: 0.
        cu_seqlens: where each of the packed sequences begins, and where the last one ends.
    """

    query: Float[Array, "b s n h"]
    key: Float[Array, "b s k h"]
    value: Float[Array, "b s k v"]
    gate: Float[Array, "b s k #h"] | None = None
    g_gamma: Float[Array, "b k"] | None = None
    gv: Float[Array, "b s k v"] | None = None
    initial_state: Float[Array, "b m k h v"] | None = None
    cu_seqlens: Int[Array, "b c"] | None = None


class Outputs(NamedTuple):
    """The results of a call.

    Attributes:
        out: in the dtype of the query; 0 for tokens past the last packed sequence.
        state: the state after the last token of every sequence, in float32 (float64 for float64
            inputs).
    """

    out: Float[Array, "b s n v"]
    state: Float[Array, "b m k h v"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The static arguments of a call."""

    softmax_scale: float
    reverse: bool = False


def sequences(inputs: Inputs) -> int:
    """How many sequences a row holds."""
    return 1 if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[1] - 1


def sample(inputs: Inputs, drawn: Inputs, spec: Spec) -> Inputs:
    """Data to tune on: gates that decay, and sequences of one length where none are known yet."""
    decays = {
        name: -jnp.abs(x)
        for name in ("gate", "g_gamma", "gv")
        if (x := getattr(drawn, name)) is not None
    }
    drawn = drawn._replace(**decays)
    packed = inputs.cu_seqlens
    if packed is None or not unknown(packed):
        return drawn
    ends = jnp.linspace(0, inputs.query.shape[1], packed.shape[1]).astype(packed.dtype)
    return drawn._replace(cu_seqlens=jnp.broadcast_to(ends, packed.shape))
