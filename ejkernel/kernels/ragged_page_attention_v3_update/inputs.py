"""What a call that writes the cache carries below its API: arrays, static arguments, results."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple, TypeVar

import jax
from jaxtyping import Array, Float, Int, Num

from ejkernel.kernels.ragged_page_attention_v3 import inputs as reading
from ejkernel.kernels.ragged_page_attention_v3.config import PagedConfig
from ejkernel.kernels.ragged_page_attention_v3_update.config import (
    RaggedPageAttentionv3UpdateConfig,
)
from ejkernel.ops.platform import Device

Result = TypeVar("Result")


class Inputs(NamedTuple):
    """The arrays of a call: those of `ragged_page_attention_v3`, and the new keys and values."""

    query: Float[Array, "b t n h"]
    key: Float[Array, "b t k h"]
    value: Float[Array, "b t k v"]
    key_pages: Num[Array, "p c k h"]
    value_pages: Num[Array, "p c k v"]
    query_starts: Int[Array, "b s"]
    query_lens: Int[Array, "b s"]
    kv_lens: Int[Array, "b s"]
    page_indices: Int[Array, "b s j"]
    sinks: Float[Array, "#n m"] | None = None
    k_scale: Float[Array, "k"] | None = None
    v_scale: Float[Array, "k"] | None = None
    traced_window: Int[Array, "#b"] | None = None


class InputsHND(Inputs):
    """Heads before the slots of a page."""

    key_pages: Num[Array, "p k c h"]
    value_pages: Num[Array, "p k c v"]


class InputsHNPD(Inputs):
    """Heads before the pages."""

    key_pages: Num[Array, "k p c h"]
    value_pages: Num[Array, "k p c v"]


class Outputs(NamedTuple):
    """The results of a call: those of `ragged_page_attention_v3`, and the cache as it is now."""

    out: Float[Array, "b t n v"]
    lse: Float[Array, "b n t"]
    key_pages: Num[Array, "p c k h"]
    value_pages: Num[Array, "p c k v"]


class OutputsHND(Outputs):
    """Heads before the slots of a page."""

    key_pages: Num[Array, "p k c h"]
    value_pages: Num[Array, "p k c v"]


class OutputsHNPD(Outputs):
    """Heads before the pages."""

    key_pages: Num[Array, "k p c h"]
    value_pages: Num[Array, "k p c v"]


LAYOUTS: dict[str, tuple[type[Inputs], type[Outputs]]] = {
    "NHD": (Inputs, Outputs),
    "HND": (InputsHND, OutputsHND),
    "HNPD": (InputsHNPD, OutputsHNPD),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec(reading.Spec):
    """The static arguments of a call."""

    config: ClassVar[type[PagedConfig]] = RaggedPageAttentionv3UpdateConfig


def reading_inputs(
    inputs: Inputs, spec: Spec, key_pages: jax.Array, value_pages: jax.Array
) -> reading.Inputs:
    """The call that reads this cache, once the new tokens are in it."""
    return attention_call(inputs, spec)._replace(key_pages=key_pages, value_pages=value_pages)


def attention_call(inputs: Inputs, spec: Spec) -> reading.Inputs:
    """The call that reads the cache as it is given; it has the shapes of the one that follows."""
    same = {name: getattr(inputs, name) for name in reading.Inputs._fields}
    return reading.APART[spec.kv_layout](**same)


def of_attention(
    function: Callable[[reading.Inputs, Spec, Device], Result],
) -> Callable[[Inputs, Spec, Device], Result]:
    """What `function` says of the attention that follows the write."""
    return lambda inputs, spec, device: function(attention_call(inputs, spec), spec, device)


def sample(inputs: Inputs, drawn: Inputs, spec: Spec) -> Inputs:
    """Data to tune on, as that of the call that only reads."""
    call, data = (attention_call(x, spec) for x in (inputs, drawn))
    likely = reading.sample(call, data, spec)
    names = ("query_starts", "query_lens", "kv_lens", "page_indices", "traced_window")
    return drawn._replace(**{name: getattr(likely, name) for name in names})
