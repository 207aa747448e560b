"""The configuration class of grouped matmul."""

import dataclasses

from ejkernel.ops.config import Config


@dataclasses.dataclass(frozen=True)
class GroupedMatmulConfig(Config):
    """Tiles and launch parameters.

    Args:
        block_m: rows of a tile.
        block_n: columns of a tile of the output.
        block_k: columns of the inputs that a kernel takes at once.
        num_warps: warps of a GPU kernel.
        num_stages: pipeline stages of a GPU kernel.
        bypass_xla_tiling: leave the layout in memory to the kernel, where one can choose it.

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
        for name in ("block_m", "block_n", "block_k", "num_warps", "num_stages"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"GroupedMatmulConfig: {name} must be a positive int, got {value!r}."
                )
        if not isinstance(self.bypass_xla_tiling, bool):
            raise ValueError(
                "GroupedMatmulConfig: bypass_xla_tiling must be True or False, "
                f"got {self.bypass_xla_tiling!r}."
            )
