"""What a call of ring attention carries below its API, on each device of the ring."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float

from ejkernel.kernels.flash_attention.inputs import Outputs as Outputs
from ejkernel.types.rules import Everything, Rule


class Inputs(NamedTuple):
    """The arrays of a call: this device's share of queries and keys, and what concerns all keys."""

    query: Float[Array, "b t n h"]
    key: Float[Array, "b s k h"]
    value: Float[Array, "b s k v"]
    bias: Float[Array, "#b #n #t #r"] | None = None  # r: the keys of the whole ring
    sinks: Float[Array, "#n m"] | None = None
    mask: Rule | None = Everything()  # of the whole sequences


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The static arguments of a call."""

    softmax_scale: float
    logits_soft_cap: float | None = None
    axis_name: str | None = None  # the mesh axis of the ring; None: one device has everything
