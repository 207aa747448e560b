"""A matmul in which every row has the weight of its group: mixture of experts."""

from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import (
    Outputs,
    partial_spec,
    sample,
    share,
    unsplittable,
)
from ejkernel.ops.implementation import Op, Source
from ejkernel.ops.platform import Backend, Platform

OP = Op(
    name="grouped_matmul",
    config=GroupedMatmulConfig,
    outputs=Outputs,
    reference="ejkernel.kernels.grouped_matmul.reference",
    sources=[
        Source(Platform.PALLAS, Backend.GPU, "ejkernel.kernels.grouped_matmul.pallas_sm90"),
        Source(Platform.TRITON, Backend.GPU, "ejkernel.kernels.grouped_matmul.triton"),
        Source(Platform.PALLAS, Backend.TPU, "ejkernel.kernels.grouped_matmul.pallas_tpu"),
        Source(Platform.XLA, Backend.ANY, "ejkernel.kernels.grouped_matmul.xla"),
    ],
    operands=("inputs", "weights", "group_ids", "group_offset", "existing_out"),
    shardable=frozenset("rekn"),
    unsplittable=unsplittable,
    share=share,
    contracted=frozenset("ek"),
    partial_spec=partial_spec,
    sharding_hints={
        "r": "; rows are split with group_ids",
        "e": "; existing_out is added to one result",
        "k": "; existing_out is added to one result",
    },
    bucketed=frozenset("br"),
    tuning_inputs=sample,
)
