"""The configuration class of mean pooling."""

import dataclasses

from ejkernel.ops.config import Config


@dataclasses.dataclass(frozen=True)
class MeanPoolingConfig(Config):
    """Blocks and launch parameters.

    Args:
        block_size: tokens that are added up at once.
        num_warps: warps of a GPU kernel.
        num_stages: pipeline stages of a GPU kernel.
        block_dim: columns that a kernel takes at once.

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
        for name in ("block_size", "num_warps", "num_stages", "block_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"MeanPoolingConfig: {name} must be a positive int, got {value!r}."
                )
