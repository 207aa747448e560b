"""The configuration class of lightning attention."""

import dataclasses

from ejkernel.kernels.gla_attention.config import GLAttentionConfig


@dataclasses.dataclass(frozen=True)
class LightningAttentionConfig(GLAttentionConfig):
    """The same fields as gated linear attention's."""
