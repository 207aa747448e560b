"""The configuration class of flash attention."""

import dataclasses

from ejkernel.ops.config import BwdParams, Config, FwdParams


@dataclasses.dataclass(frozen=True)
class FlashAttentionConfig(Config):
    """Tiles and launch parameters of the two passes; what is left None is chosen for the call.

    Args:
        fwd_params: those of the forward pass.
        bwd_params: those of the backward pass, which may run on another platform.

    >>> from ejkernel.ops import FwdParams
    >>> FlashAttentionConfig(fwd_params=FwdParams(q_blocksize=128, kv_blocksize=256)).platform
    'auto'
    """

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
