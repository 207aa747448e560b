"""Linear attention whose state decays by gates, in time and memory linear in the sequence."""

from ejkernel.kernels.gla_attention.config import GLAttentionConfig
from ejkernel.kernels.gla_attention.inputs import Outputs, sample
from ejkernel.kernels.gla_attention.split_sequence import over_axis
from ejkernel.ops.implementation import Op, Source
from ejkernel.ops.platform import Backend, Platform

OP = Op(
    name="gla_attention",
    config=GLAttentionConfig,
    outputs=Outputs,
    reference="ejkernel.kernels.gla_attention.reference",
    sources=[
        Source(Platform.PALLAS, Backend.TPU, "ejkernel.kernels.gla_attention.pallas_tpu"),
        Source(Platform.TRITON, Backend.GPU, "ejkernel.kernels.gla_attention.triton"),
        Source(Platform.XLA, Backend.ANY, "ejkernel.kernels.gla_attention.xla"),
    ],
    operands=("query", "key", "value", "gate"),
    shardable=frozenset("bnk"),
    sequence=frozenset("s"),
    over_axis=over_axis,
    bucketed=frozenset("bs"),
    grouped_axes={"k": "n"},
    sharding_hints={"s": "; axis_name= splits the sequence"},
    tuning_inputs=sample,
)
