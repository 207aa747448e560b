"""The mean of the valid tokens of every sequence, padded or packed."""

from ejkernel.kernels.mean_pooling.config import MeanPoolingConfig
from ejkernel.kernels.mean_pooling.inputs import Outputs, sample
from ejkernel.ops.implementation import Op, Source
from ejkernel.ops.platform import Backend, Platform

OP = Op(
    name="mean_pooling",
    config=MeanPoolingConfig,
    outputs=Outputs,
    reference="ejkernel.kernels.mean_pooling.reference",
    sources=[
        Source(Platform.TRITON, Backend.GPU, "ejkernel.kernels.mean_pooling.triton"),
        Source(Platform.XLA, Backend.ANY, "ejkernel.kernels.mean_pooling.xla"),
    ],
    operands=("x", "attention_mask"),
    shardable=frozenset("bd"),
    bucketed=frozenset("bs"),
    tuning_inputs=sample,
)
