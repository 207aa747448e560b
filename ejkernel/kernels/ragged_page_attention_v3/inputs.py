"""What a call over pages carries below its API: arrays, static arguments, results.

`b` rows of packed queries, each with `s` sequences of its own; `j` entries of a page table; the
cache has `p` pages of `c` slots. A ragged call is one row of many sequences, a batch of decoding
sequences is many rows of one. So the batch can be split over a mesh and grow under vmap while the
cache is shared.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Num

from ejkernel.kernels.common.paged import cache_axes
from ejkernel.kernels.ragged_page_attention_v3.config import (
    PagedConfig,
    RaggedPageAttentionv3Config,
)


class Inputs(NamedTuple):
    """The arrays of a call; gradients and partition specs come in the same shape.

    Sequence `s` of a row holds `query_lens` queries from `query_starts` on; they are the last of
    its `kv_lens` tokens, and position `i` lies in slot `i % c` of page `page_indices[i // c]`.
    `traced_window` stands for `Spec.sliding_window` where that is known only at run time.
    """

    query: Float[Array, "b t n h"]
    key_pages: Num[Array, "p c k h"]
    value_pages: Num[Array, "p c k v"] | None
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
    value_pages: Num[Array, "p k c v"] | None


class InputsHNPD(Inputs):
    """Heads before the pages."""

    key_pages: Num[Array, "k p c h"]
    value_pages: Num[Array, "k p c v"] | None


class CombinedInputs(Inputs):
    """Keys and values of a head side by side in `key_pages`; there are no `value_pages`."""

    key_pages: Num[Array, "p c k w h"]


class CombinedInputsHND(Inputs):
    """Combined, heads before the slots of a page."""

    key_pages: Num[Array, "p k w c h"]


class CombinedInputsHNPD(Inputs):
    """Combined, heads before the pages."""

    key_pages: Num[Array, "k w p c h"]


APART: dict[str, type[Inputs]] = {"NHD": Inputs, "HND": InputsHND, "HNPD": InputsHNPD}
COMBINED: dict[str, type[Inputs]] = {
    "NHD": CombinedInputs,
    "HND": CombinedInputsHND,
    "HNPD": CombinedInputsHNPD,
}


class Outputs(NamedTuple):
    """The results of a call, which are also what its backward pass needs.

    Attributes:
        out: the attention output, in the dtype of the query, or in that of the log-sum-exp where
            the call asks for it; 0 for a query of no sequence.
        lse: the natural log-sum-exp of the logits of the visible keys, sinks not counted, in
            float32 (float64 for float64 inputs); -inf for a query that sees nothing.
    """

    out: Float[Array, "b t n v"]
    lse: Float[Array, "b n t"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The static arguments of a call; `config` is the configuration class of its op.

    With `float32_out` the output has the dtype of the log-sum-exp: a partial result, which is
    merged with those of other devices.
    """

    config: ClassVar[type[PagedConfig]] = RaggedPageAttentionv3Config

    softmax_scale: float
    logits_soft_cap: float | None = None
    sliding_window: int | None = None
    kv_layout: str = "NHD"
    float32_out: bool = False

    def describe(self) -> dict[str, Any]:
        """What a configuration may depend on: all but the dtype of the output."""
        fields = dataclasses.asdict(self)
        del fields["float32_out"]
        return {type(self).__name__: fields}

    def out_dtype(self, query: np.dtype) -> np.dtype:
        """The dtype of the output of a call with queries of this dtype."""
        return jnp.promote_types(query, jnp.float32) if self.float32_out else query


def sample(inputs: Inputs, drawn: Inputs, spec: Spec) -> Inputs:
    """Data to tune on: where lengths are not known yet every table is full, every query in use."""
    b, t = inputs.query.shape[:2]
    s, j = inputs.page_indices.shape[1:]
    axes = cache_axes(spec.kv_layout, combined=inputs.value_pages is None)
    pages, slots = (inputs.key_pages.shape[axes.index(letter)] for letter in "pc")
    queries = np.full((b, s), t // s, np.int32)
    likely = {
        "query_starts": np.cumsum(queries, axis=1, dtype=np.int32) - queries,
        "query_lens": queries,
        "kv_lens": np.full((b, s), j * slots, np.int32),
        "page_indices": np.arange(b * s * j, dtype=np.int32).reshape(b, s, j) % pages,
        "traced_window": np.full((1,), j * slots, np.int32),
    }
    unknown = (Tracer, jax.ShapeDtypeStruct)
    return drawn._replace(
        **{
            name: jnp.asarray(value)
            for name, value in likely.items()
            if isinstance(getattr(inputs, name), unknown)
        }
    )


# What a fused kernel supports beyond the plain call.
KERNEL_FEATURES = frozenset(
    {"k_scale", "kv_layout", "logits_soft_cap", "sinks", "sliding_window", "v_scale"}
)
