"""The configuration class of ragged attention that also writes the cache."""

import dataclasses

from ejkernel.kernels.ragged_page_attention_v3.config import RaggedPageAttentionv3Config


@dataclasses.dataclass(frozen=True)
class RaggedPageAttentionv3UpdateConfig(RaggedPageAttentionv3Config):
    """The same fields as those of `RaggedPageAttentionv3Config`."""
