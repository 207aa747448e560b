"""Attention over chosen blocks of keys, a compressed view of all of them, and the newest ones."""

from ejkernel.kernels.native_sparse_attention.config import NativeSparseAttentionConfig
from ejkernel.kernels.native_sparse_attention.inputs import Outputs, Selection, sample
from ejkernel.kernels.native_sparse_attention.split_sequence import over_axis
from ejkernel.ops.implementation import Op, Source
from ejkernel.ops.platform import Backend, Platform

_MODULE = "ejkernel.kernels.native_sparse_attention"

OP = Op(
    name="native_sparse_attention",
    config=NativeSparseAttentionConfig,
    outputs=Outputs,
    reference=f"{_MODULE}.reference",
    sources=[
        Source(Platform.TRITON, Backend.GPU, f"{_MODULE}.triton"),
        Source(Platform.XLA, Backend.ANY, f"{_MODULE}.xla"),
    ],
    operands=("query", "key", "value", "g_cmp", "g_slc", "g_swa"),
    shardable=frozenset("bnk"),
    sequence=frozenset("ts"),
    over_axis=over_axis,
    later_inputs=frozenset({"traced_window", "query_start"}),
    bucketed=frozenset("bt"),
    grouped_axes={"k": "n"},
    sharding_hints={"t": "; axis_name= splits the sequences"},
    tuning_inputs=sample,
)

# The choice of blocks for a call that gives none.
SELECTION = Op(
    name="native_sparse_attention_selection",
    outputs=Selection,
    sources=[
        Source(Platform.TRITON, Backend.GPU, f"{_MODULE}.triton.selection"),
        Source(Platform.XLA, Backend.ANY, f"{_MODULE}.selection"),
    ],
    operands=("query", "key"),
    shardable=frozenset("bk"),
    sequence=frozenset("ts"),
    over_axis=over_axis,
    later_inputs=frozenset({"query_start"}),
    sharding_hints=OP.sharding_hints,
    auxiliary=True,
)
