"""Sequences that are split over the devices of a mesh axis: the keys come to the queries.

Device `i` of `n` holds queries and keys `[i * length / n, (i + 1) * length / n)`. Keys and values
are gathered on every device, which attends from its queries under the rows of the mask that are
theirs; the gradients of keys and values are summed in float32 and scattered back.
"""

from collections.abc import Callable

from jax import lax
from jaxtyping import Array, Float

from ejkernel.kernels.common.gathering import gathered
from ejkernel.kernels.flash_attention import inputs as flash


class SplitInputs(flash.Inputs):
    """The arrays of a call whose queries and keys are split; `r` are the keys of all devices."""

    bias: Float[Array, "#b #n #t #r"] | None = None


def over_axis(
    run: Callable[[flash.Inputs], flash.Outputs],
    inputs: SplitInputs,
    spec: flash.Spec,
    axis_name: str,
) -> flash.Outputs:
    """The outputs of this device's queries."""
    key, value = (gathered(x, axis_name) for x in (inputs.key, inputs.value))
    queries, mask = inputs.query.shape[1], inputs.mask
    if mask is not None:
        first = lax.axis_index(axis_name) * queries
        mask = mask.slice(first, queries, 0, key.shape[1])
    return run(flash.Inputs(*inputs._replace(key=key, value=value, mask=mask)))
