"""The configuration classes of attention over ragged sequences of pages."""

import dataclasses

from ejkernel.ops.config import Config, check_size


@dataclasses.dataclass(frozen=True)
class PagedConfig(Config):
    """What every implementation over pages asks its configuration, whatever its op calls it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("platform", "backend") or value is None:
                continue
            kind = "0 or a positive int" if field.default == 0 else "a positive int"
            check_size(self, field.name, kind)

    @property
    def queries_per_block(self) -> int | None:
        """Queries of one sequence taken at once; None: the implementation's own choice."""
        return getattr(self, "num_queries_per_block", None)

    @property
    def pages_per_block(self) -> int | None:
        """Pages taken at once; None: the implementation's own choice."""
        return getattr(self, "num_kv_pages_per_block", None)


@dataclasses.dataclass(frozen=True)
class RaggedPageAttentionv3Config(PagedConfig):
    """Blocks and launch parameters; what is left None is chosen for the call.

    Args:
        num_kv_pages_per_block: pages of a block of keys; read by XLA, Triton and Mosaic TPU.
        num_queries_per_block: queries of a sequence in a block; read by the same.
        num_warps: warps of a thread block; read by Triton.
        num_stages: stages of the pipeline of key and value tiles; read by Triton.
        chunk_prefill_size: read by nothing; part of the interface of the original package.

    >>> RaggedPageAttentionv3Config(num_kv_pages_per_block=8).num_queries_per_block is None
    True
    """

    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    num_warps: int = 4
    num_stages: int = 1
    chunk_prefill_size: int | None = None
