"""Ragged attention over pages that first writes the new keys and values into the cache."""

from ejkernel.kernels.ragged_page_attention_v3_update.config import (
    RaggedPageAttentionv3UpdateConfig,
)
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import Outputs, sample
from ejkernel.ops.implementation import Op, Source
from ejkernel.ops.platform import Backend, Platform

OP = Op(
    name="ragged_page_attention_v3_update",
    config=RaggedPageAttentionv3UpdateConfig,
    outputs=Outputs,
    reference="ejkernel.kernels.ragged_page_attention_v3_update.reference",
    sources=[
        Source(
            Platform.TRITON,
            Backend.GPU,
            "ejkernel.kernels.ragged_page_attention_v3_update.triton",
        ),
        Source(
            Platform.PALLAS,
            Backend.TPU,
            "ejkernel.kernels.ragged_page_attention_v3_update.pallas_tpu",
        ),
        Source(Platform.XLA, Backend.ANY, "ejkernel.kernels.ragged_page_attention_v3_update.xla"),
    ],
    operands=(
        "query",
        "key",
        "value",
        "key_pages",
        "value_pages",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "page_indices",
        "sinks",
    ),
    shardable=frozenset("nk"),
    bucketed=frozenset("btsjp"),
    grouped_axes={"k": "n"},
    sharding_hints={"t": "; the sequences share one list of queries: split the heads"},
    tuning_inputs=sample,
)
