"""The configuration class of mean pooling."""

import dataclasses

from ejkernel.kernels.common.arguments import check_positive_ints
from ejkernel.ops.config import Config


@dataclasses.dataclass(frozen=True)
class MeanPoolingConfig(Config):
    """Block sizes and launch parameters.

    Args:
        block_size: tokens that are summed at once; Triton: those of a program.
        num_warps: of a Triton program.
        num_stages: read by no kernel; kept so that configurations that name it load.
        block_dim: columns of a Triton program.

    Raises:
        ValueError: a field is not a positive int.

    >>> MeanPoolingConfig(block_size=128).block_dim
    64
    """

    block_size: int = 64
    num_warps: int = 4
    num_stages: int = 1
    block_dim: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_ints(self, "block_size", "num_warps", "num_stages", "block_dim")
