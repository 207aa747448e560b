"""What a call of flash attention carries below its API: arrays, static arguments, results."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float

from ejkernel.kernels.common.sampling import visible
from ejkernel.kernels.flash_attention.dropout import Dropout as Dropout
from ejkernel.types.rules import Everything, Rule


class Inputs(NamedTuple):
    """The arrays of a call; gradients and partition specs come in the same shape."""

    query: Float[Array, "b t n h"]
    key: Float[Array, "b s k h"]
    value: Float[Array, "b s k v"]
    bias: Float[Array, "#b #n #t #s"] | None = None
    sinks: Float[Array, "#n m"] | None = None
    mask: Rule | None = Everything()
    dropout: Dropout | None = None


class Outputs(NamedTuple):
    """The results of a call, which are also what its backward pass needs.

    Attributes:
        out: the attention output, in the dtype of the query.
        lse: the natural log-sum-exp of the logits of the visible keys, sinks not counted, in
            float32 (float64 for float64 inputs); -inf for a row that sees nothing.
    """

    out: Float[Array, "b t n v"]
    lse: Float[Array, "b n t"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The static arguments of a call."""

    softmax_scale: float
    logits_soft_cap: float | None = None
    dropout_prob: float = 0.0


def sample(inputs: Inputs, drawn: Inputs, spec: Spec) -> Inputs:
    """Data to tune on: as drawn, with masks that hide nothing by a length not known yet."""
    if inputs.mask is None or drawn.mask is None:
        return drawn
    return drawn._replace(mask=visible(inputs.mask, drawn.mask))


# What a fused kernel supports beyond the plain call if it supports everything.
KERNEL_FEATURES = frozenset(
    {
        "causal",
        "window",
        "positions",
        "segments",
        "token_types",
        "chunks",
        "lengths",
        "blocks",
        "mask",
        "union",
        "bias",
        "sinks",
        "dropout",
        "dropout_prob",
        "logits_soft_cap",
    }
)
