"""Sequences that are split over the devices of a mesh axis: the keys come to the queries.

Device `i` of `n` holds queries and keys `[i * length / n, (i + 1) * length / n)`. Keys and values
are gathered on every device, which attends from its queries under the rows of the mask that are
theirs; the gradients of keys and values are summed in float32 and scattered back.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from jax import lax
from jaxtyping import Array, Float

from ejkernel.kernels.common.gathering import gathered
from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.ops.device_program import DeviceProgram


class SplitInputs(flash.Inputs):
    """The arrays of a call whose queries and keys are split; `r` are the keys of all devices."""

    bias: Float[Array, "#b #n #t #r"] | None = None


@dataclasses.dataclass(frozen=True)
class SplitSequence(DeviceProgram):
    """Attention of a device's queries to the keys of all devices."""

    letters: ClassVar[frozenset[str]] = frozenset("ts")
    replicated: ClassVar[frozenset[str]] = frozenset({"mask"})

    def __call__(
        self, run: Callable[[flash.Inputs], flash.Outputs], inputs: SplitInputs
    ) -> flash.Outputs:
        """The outputs of this device's queries."""
        key, value = (gathered(x, self.axis_name) for x in (inputs.key, inputs.value))
        queries, mask = inputs.query.shape[1], inputs.mask
        if mask is not None:
            first = lax.axis_index(self.axis_name) * queries
            mask = mask.slice(first, queries, 0, key.shape[1])
        arrays = inputs._replace(key=key, value=value, mask=mask)
        return run(flash.Inputs(*arrays))
