"""The configuration class of gated linear attention."""

import dataclasses

from ejkernel.kernels.common.arguments import check_positive_ints
from ejkernel.ops.config import Config


@dataclasses.dataclass(frozen=True)
class GLAttentionConfig(Config):
    """Blocks and launch parameters.

    Args:
        block_q: tokens of a chunk, a power of two.
        block_k: key heads, counted over the batch, that XLA works on at once; key heads of a step
            of a TPU kernel; rows of the state that a GPU kernel works on.
        block_d: columns of the state that a GPU kernel works on at once.
        num_warps: warps of a GPU kernel.
        num_stages: pipeline stages of a GPU kernel.

    Raises:
        ValueError: a field is not a positive int, or block_q is no power of two.

    >>> GLAttentionConfig(block_q=128).block_d
    64
    """

    block_q: int = 64
    block_k: int = 64
    block_d: int = 64
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_ints(self, "block_q", "block_k", "block_d", "num_warps", "num_stages")
        if self.block_q & (self.block_q - 1):
            raise ValueError(
                f"{type(self).__name__}: block_q must be a power of two, got {self.block_q}."
            )
