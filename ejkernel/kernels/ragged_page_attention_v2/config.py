"""The configuration class of ragged attention over combined pages."""

import dataclasses

from ejkernel.kernels.ragged_page_attention_v3.config import PagedConfig


@dataclasses.dataclass(frozen=True)
class RaggedPageAttentionv2Config(PagedConfig):
    """Blocks and launch parameters; what is left None is chosen for the call.

    Args:
        num_kv_pages_per_block: pages of a block of keys; read by XLA, Triton and Mosaic TPU.
        num_queries_per_block: queries of a sequence in a block; read by the same.
        num_warps: warps of a thread block; read by Triton.
        num_stages: stages of the pipeline of key and value tiles; read by Triton.

    >>> RaggedPageAttentionv2Config(num_queries_per_block=32).num_kv_pages_per_block is None
    True
    """

    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    num_warps: int = 4
    num_stages: int = 1
