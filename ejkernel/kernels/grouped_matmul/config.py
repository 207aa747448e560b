"""The configuration class of grouped matmul."""

import dataclasses

from ejkernel.kernels.common.arguments import check_positive_ints
from ejkernel.ops.config import Config


@dataclasses.dataclass(frozen=True)
class GroupedMatmulConfig(Config):
    """Tile sizes and launch parameters.

    Forward, a tile of the output has `block_m` rows and `block_n` columns and is summed over `k` in
    steps of `block_k`. Backward, GPU kernels use the same sizes for the gradient of the rows, whose
    columns are those of `k`, and derive the tiles of the weight gradient from them. TPU kernels cut
    `k` by `block_k` and `n` by `block_n` in both gradients.

    Args:
        block_m: rows of a tile; read on every platform.
        block_n: columns of a tile; read on GPUs and TPUs.
        block_k: size of a step of the sum over k; read by Triton and on TPUs. The Hopper kernels
            always take 64.
        num_warps: warps of a thread block; read by Triton. The Hopper kernels have one producer
            warpgroup and one for each 64 rows of a tile.
        num_stages: pipeline stages; read on GPUs.
        bypass_xla_tiling: read by no kernel; kept so that configurations that name it load.

    Raises:
        ValueError: a number is not a positive int, or `bypass_xla_tiling` is not a bool.

    >>> GroupedMatmulConfig(block_m=256).block_n
    128
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 2
    bypass_xla_tiling: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_ints(self, "block_m", "block_n", "block_k", "num_warps", "num_stages")
        if not isinstance(self.bypass_xla_tiling, bool):
            raise ValueError(
                "GroupedMatmulConfig: bypass_xla_tiling must be True or False, "
                f"got {self.bypass_xla_tiling!r}."
            )
