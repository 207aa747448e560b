"""Attention over sequences that are spread over the devices of a ring."""

from ejkernel.kernels.ring_attention.config import RingAttentionConfig
from ejkernel.kernels.ring_attention.inputs import Outputs
from ejkernel.ops.implementation import Op, Source
from ejkernel.ops.platform import Backend, Platform

OP = Op(
    name="ring_attention",
    config=RingAttentionConfig,
    outputs=Outputs,
    reference="ejkernel.kernels.ring_attention.reference",
    sources=[
        Source(Platform.PALLAS, Backend.TPU, "ejkernel.kernels.ring_attention.pallas_tpu"),
        Source(Platform.TRITON, Backend.GPU, "ejkernel.kernels.ring_attention.triton"),
        Source(Platform.XLA, Backend.ANY, "ejkernel.kernels.ring_attention.xla"),
    ],
    operands=("query", "key", "value", "bias", "sinks"),
    shardable=frozenset("bnk"),
    sequence=frozenset("ts"),
    bucketed=frozenset("bts"),
    grouped_axes={"k": "n"},
    replicated=frozenset({"mask"}),
    sharding_hints=dict.fromkeys("ts", "; axis_name= splits the sequences"),
)
