"""What a call of ring attention carries below its API, on each device of the ring."""

import dataclasses
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from jaxtyping import Array, Float

from ejkernel.kernels.flash_attention.dropout import Dropout as Dropout
from ejkernel.kernels.flash_attention.inputs import Outputs as Outputs
from ejkernel.types.placement import Placement
from ejkernel.types.rules import Everything, Rule

Method: TypeAlias = Literal["auto", "ring", "all_gather", "all_to_all"]
METHODS: Final[tuple[Method, ...]] = get_args(Method)


class Hop(NamedTuple):
    """A hop of the ring: device i attends to the keys of device `i - distance`.

    `everyone` says that each device needs it, so that none has to look.
    """

    distance: int
    everyone: bool


class Inputs(NamedTuple):
    """The arrays of a call: this device's share of queries and keys, and what concerns all keys."""

    query: Float[Array, "b t n h"]
    key: Float[Array, "b s k h"]
    value: Float[Array, "b s k v"]
    bias: Float[Array, "#b #n #t #r"] | None = None  # r: the keys of the whole ring, by position
    sinks: Float[Array, "#n m"] | None = None
    mask: Rule | None = Everything()  # of the whole sequences, by position
    dropout: Dropout | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The static arguments of a call.

    Attributes:
        axis_name: the mesh axis of the ring; None: one device has everything.
        hops: those that some device needs, as far as that is known; None: all, if it is not.
    """

    softmax_scale: float
    logits_soft_cap: float | None = None
    axis_name: str | None = None
    placement: Placement = "contiguous"
    method: Method = "auto"
    hops: tuple[Hop, ...] | None = None
    dropout_prob: float = 0.0
