"""Attention of ragged sequences, prefilling and decoding together, over a cache of pages."""

from ejkernel.kernels.ragged_page_attention_v3.config import RaggedPageAttentionv3Config
from ejkernel.kernels.ragged_page_attention_v3.inputs import Outputs, sample
from ejkernel.kernels.ragged_page_attention_v3.split_context import over_axis
from ejkernel.ops.implementation import Op, Source
from ejkernel.ops.platform import Backend, Platform

OP = Op(
    name="ragged_page_attention_v3",
    config=RaggedPageAttentionv3Config,
    outputs=Outputs,
    reference="ejkernel.kernels.ragged_page_attention_v3.reference",
    sources=[
        Source(Platform.TRITON, Backend.GPU, "ejkernel.kernels.ragged_page_attention_v3.triton"),
        Source(
            Platform.PALLAS, Backend.TPU, "ejkernel.kernels.ragged_page_attention_v3.pallas_tpu"
        ),
        Source(Platform.XLA, Backend.ANY, "ejkernel.kernels.ragged_page_attention_v3.xla"),
    ],
    operands=(
        "query",
        "key_pages",
        "value_pages",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "page_indices",
        "sinks",
    ),
    shardable=frozenset("nk"),
    sequence=frozenset("p"),
    over_axis=over_axis,
    later_inputs=frozenset({"traced_window"}),
    bucketed=frozenset("btsjp"),
    grouped_axes={"k": "n"},
    sharding_hints={
        "t": "; the sequences share one list of queries: split the heads",
        "p": "; axis_name= splits the pages",
    },
    tuning_inputs=sample,
)
