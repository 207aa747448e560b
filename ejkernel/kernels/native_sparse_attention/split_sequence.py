"""Sequences that are split over the devices of a mesh axis: the keys come to the queries.

Device `i` of `n` holds the tokens `[i * length / n, (i + 1) * length / n)`. Keys and values are
gathered on every device, which attends from its own tokens; the gradients of keys and values are
summed in float32 and scattered back.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax
from jaxtyping import Array, Float

from ejkernel.kernels.common.gathering import gathered
from ejkernel.kernels.native_sparse_attention.inputs import Inputs, SelectionInputs, Spec

_Inputs = TypeVar("_Inputs", bound=Inputs | SelectionInputs)


class SplitInputs(Inputs):
    """The arrays of a call with fewer queries than keys."""

    key: Float[Array, "b s k h"]
    value: Float[Array, "b s k v"]


class SplitSelectionInputs(SelectionInputs):
    """Those of a call that chooses the blocks of fewer queries than there are keys."""

    key: Float[Array, "b s k h"]


def over_axis(run: Callable[[_Inputs], Any], inputs: _Inputs, spec: Spec, axis_name: str) -> Any:
    """The results of this device's tokens, of the attention or of the selection."""
    start = lax.axis_index(axis_name) * inputs.query.shape[1]
    changes: dict[str, jax.Array] = {"query_start": start, "key": gathered(inputs.key, axis_name)}
    if isinstance(inputs, Inputs):
        changes["value"] = gathered(inputs.value, axis_name)
    return run(inputs._replace(**changes))
