"""The configuration class of ring attention."""

import dataclasses

from ejkernel.ops.config import BwdParams, Config, FwdParams


@dataclasses.dataclass(frozen=True)
class RingAttentionConfig(Config):
    """Blocks of one hop's attention; what is left None is chosen for the call."""

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
