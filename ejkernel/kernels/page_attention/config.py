"""The configuration class of attention over pages."""

import dataclasses

from ejkernel.kernels.ragged_page_attention_v3.config import PagedConfig


@dataclasses.dataclass(frozen=True)
class PageAttentionConfig(PagedConfig):
    """Splits, blocks and launch parameters; what is left 0 or None is chosen for the call.

    Args:
        num_splits: parts into which split-KV cuts the keys of a sequence; read by Triton.
        pages_per_compute_block: pages of a block of keys; read by XLA, Triton and Mosaic TPU.
        num_warps: warps of a thread block; read by Triton.
        num_stages: stages of the pipeline of key and value tiles; read by Triton.

    >>> PageAttentionConfig(pages_per_compute_block=8).num_splits
    0
    """

    num_splits: int = 0
    pages_per_compute_block: int | None = None
    num_warps: int = 4
    num_stages: int = 1

    @property
    def pages_per_block(self) -> int | None:
        """Pages taken at once; None: the implementation's own choice."""
        return self.pages_per_compute_block
