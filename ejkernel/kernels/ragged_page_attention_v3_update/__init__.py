"""Ragged attention over pages that first writes the new keys and values into the cache."""

import dataclasses

from ejkernel.kernels.ragged_page_attention_v3 import OP as ATTENTION
from ejkernel.kernels.ragged_page_attention_v3_update.config import (
    RaggedPageAttentionv3UpdateConfig,
)
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import Outputs, sample
from ejkernel.ops.implementation import Source
from ejkernel.ops.platform import Backend, Platform

OP = dataclasses.replace(
    ATTENTION,
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
    operands=("query", "key", "value", *ATTENTION.operands[1:]),
    tuning_inputs=sample,
)
