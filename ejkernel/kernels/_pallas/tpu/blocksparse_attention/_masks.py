"""Documented import path; the code is in `ejkernel.kernels.blocksparse_attention.masks`."""

from ejkernel.kernels.blocksparse_attention.masks import (
    CausalMask as CausalMask,
)
from ejkernel.kernels.blocksparse_attention.masks import (
    ChunkedCausalMask as ChunkedCausalMask,
)
from ejkernel.kernels.blocksparse_attention.masks import (
    ComputableMask as ComputableMask,
)
from ejkernel.kernels.blocksparse_attention.masks import (
    FullMask as FullMask,
)
from ejkernel.kernels.blocksparse_attention.masks import (
    LocalMask as LocalMask,
)
from ejkernel.kernels.blocksparse_attention.masks import (
    LogicalAnd as LogicalAnd,
)
from ejkernel.kernels.blocksparse_attention.masks import (
    LogicalOr as LogicalOr,
)
from ejkernel.kernels.blocksparse_attention.masks import (
    Mask as Mask,
)
from ejkernel.kernels.blocksparse_attention.masks import (
    MultiHeadMask as MultiHeadMask,
)
from ejkernel.kernels.blocksparse_attention.masks import (
    NumpyMask as NumpyMask,
)
from ejkernel.kernels.blocksparse_attention.masks import (
    make_causal_mask as make_causal_mask,
)
from ejkernel.kernels.blocksparse_attention.masks import (
    make_chunk_attention_mask as make_chunk_attention_mask,
)
from ejkernel.kernels.blocksparse_attention.masks import (
    make_local_attention_mask as make_local_attention_mask,
)
from ejkernel.kernels.blocksparse_attention.masks import (
    make_random_mask as make_random_mask,
)
