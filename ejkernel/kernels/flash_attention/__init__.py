"""Exact softmax attention whose memory is linear in the sequence length."""

from ejkernel.kernels.flash_attention.config import FlashAttentionConfig
from ejkernel.kernels.flash_attention.inputs import Outputs, sample
from ejkernel.ops.implementation import Op, Source
from ejkernel.ops.platform import Backend, Platform

OP = Op(
    name="flash_attention",
    config=FlashAttentionConfig,
    outputs=Outputs,
    reference="ejkernel.kernels.flash_attention.reference",
    sources=[
        Source(Platform.PALLAS, Backend.TPU, "ejkernel.kernels.flash_attention.pallas_tpu"),
        Source(Platform.PALLAS, Backend.GPU, "ejkernel.kernels.flash_attention.pallas_sm90"),
        Source(Platform.CUDA, Backend.GPU, "ejkernel.kernels.flash_attention.cudnn"),
        Source(Platform.TRITON, Backend.GPU, "ejkernel.kernels.flash_attention.triton"),
        Source(Platform.XLA, Backend.ANY, "ejkernel.kernels.flash_attention.xla"),
    ],
    operands=("query", "key", "value", "bias", "sinks", "cum_seqlens_q", "cum_seqlens_k"),
    shardable=frozenset("bnk"),
    bucketed=frozenset("bts"),
    rarely_used_outputs=frozenset({"lse"}),
    grouped_axes={"k": "n"},
    sharding_hints=dict.fromkeys("ts", "; for a split sequence there is ring_attention"),
    tuning_inputs=sample,
)
