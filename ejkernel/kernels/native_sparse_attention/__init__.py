"""Attention over chosen blocks of keys, a compressed view of all of them, and the newest ones."""

from ejkernel.kernels.native_sparse_attention.config import NativeSparseAttentionConfig
from ejkernel.kernels.native_sparse_attention.inputs import Outputs, sample
from ejkernel.ops.implementation import Op, Source
from ejkernel.ops.platform import Backend, Platform

OP = Op(
    name="native_sparse_attention",
    config=NativeSparseAttentionConfig,
    outputs=Outputs,
    reference="ejkernel.kernels.native_sparse_attention.reference",
    sources=[
        Source(Platform.XLA, Backend.ANY, "ejkernel.kernels.native_sparse_attention.xla"),
    ],
    operands=("query", "key", "value", "g_cmp", "g_slc", "g_swa"),
    shardable=frozenset("bnk"),
    later_inputs=frozenset({"traced_window"}),
    bucketed=frozenset("bt"),
    grouped_axes={"k": "n"},
    sharding_hints={"t": "; every token may choose blocks from all of its sequence"},
    tuning_inputs=sample,
)
