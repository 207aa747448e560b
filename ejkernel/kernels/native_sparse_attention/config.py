"""The configuration class of native sparse attention."""

import dataclasses

from ejkernel.kernels.common.arguments import check_positive_ints
from ejkernel.ops.config import Config


@dataclasses.dataclass(frozen=True)
class NativeSparseAttentionConfig(Config):
    """Tiles and launch parameters.

    Args:
        block_q: tokens that meet a block of keys at once.
        block_k: keys that a GPU kernel takes at once.
        block_d: read by nothing; kept so that stored configurations load.
        block_size: keys in a block; it is part of what the call means and must be the call's own.
        num_warps: warps of a GPU kernel.
        num_stages: pipeline stages of a GPU kernel.

    Raises:
        ValueError: a field is not a positive int.

    >>> NativeSparseAttentionConfig(block_q=32).block_size
    64
    """

    block_q: int = 64
    block_k: int = 64
    block_d: int = 64
    block_size: int = 64
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_ints(
            self, "block_q", "block_k", "block_d", "block_size", "num_warps", "num_stages"
        )
