"""The configuration class of mean pooling."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ejkernel.kernels.common.arguments import check_positive_ints
from ejkernel.ops.config import Config


@dataclasses.dataclass(frozen=True)
class MeanPoolingConfig(Config):
    """Block sizes and launch parameters.

    Args:
        block_size: tokens that are summed at once; read by XLA.
        num_warps: warps of a program; read by Triton.
        num_stages: read by nothing; kept so that configurations that name it load.
        block_dim: columns of a program; read by Triton.
        block_tokens: tokens of a program; read by Triton.

    Raises:
        ValueError: a field is not a positive int.

    >>> MeanPoolingConfig(block_size=128).block_dim
    64
    """

    block_size: int = 64
    num_warps: int = 4
    num_stages: int = 1
    block_dim: int = 64
    block_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_ints(
            self, "block_size", "num_warps", "num_stages", "block_dim", "block_tokens"
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MeanPoolingConfig":
        """The inverse of `to_dict`; takes `block_size`, as Triton's `block_tokens` was called."""
        values = dict(values)
        triton = values.get("platform") == "triton"
        if triton and "block_size" in values and "block_tokens" not in values:
            values["block_tokens"] = values.pop("block_size")
        return super().from_dict(values)
