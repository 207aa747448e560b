"""The configuration class of gated linear attention."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from ejkernel.kernels.common.arguments import check_positive_ints
from ejkernel.ops.config import Config

_Self = TypeVar("_Self", bound="GLAttentionConfig")


@dataclasses.dataclass(frozen=True)
class GLAttentionConfig(Config):
    """Blocks and launch parameters.

    Args:
        block_q: tokens of a chunk, a power of two.
        block_k: key heads that are computed at once, by XLA counted over the batch; read by XLA and
            Mosaic TPU.
        block_d: columns of the tile of a state; read by Triton.
        num_warps: warps of a thread block; read by Triton.
        num_stages: stages of the pipeline; read by Triton.
        block_rows: rows of the tile of a state; read by Triton.

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
    block_rows: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_ints(
            self, "block_q", "block_k", "block_d", "num_warps", "num_stages", "block_rows"
        )
        if self.block_q & (self.block_q - 1):
            raise ValueError(
                f"{type(self).__name__}: block_q must be a power of two, got {self.block_q}."
            )

    @classmethod
    def from_dict(cls: type[_Self], values: Mapping[str, Any]) -> _Self:
        """The inverse of `to_dict`; also takes `block_k`, as Triton's `block_rows` was called."""
        values = dict(values)
        triton = values.get("platform") == "triton"
        if triton and "block_k" in values and "block_rows" not in values:
            values["block_rows"] = values.pop("block_k")
        return super().from_dict(values)  # pyright: ignore[reportAttributeAccessIssue]
