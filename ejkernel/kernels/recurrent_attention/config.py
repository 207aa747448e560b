"""The configuration class of recurrent attention."""

import dataclasses

from ejkernel.kernels.gla_attention.config import GLAttentionConfig


@dataclasses.dataclass(frozen=True)
class RecurrentAttentionConfig(GLAttentionConfig):
    """The same fields as gated linear attention's."""
