"""Documented import path; the code is in `ejkernel.kernels.blocksparse_attention`."""

from ejkernel.kernels._pallas.tpu.blocksparse_attention._info import (
    MaskInfo as MaskInfo,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._info import (
    process_dynamic_mask as process_dynamic_mask,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._info import (
    process_dynamic_mask_dkv as process_dynamic_mask_dkv,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._info import (
    process_mask as process_mask,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._info import (
    process_mask_dkv as process_mask_dkv,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    CausalMask as CausalMask,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    ChunkedCausalMask as ChunkedCausalMask,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    ComputableMask as ComputableMask,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    FullMask as FullMask,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    LocalMask as LocalMask,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    LogicalAnd as LogicalAnd,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    LogicalOr as LogicalOr,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    Mask as Mask,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    MultiHeadMask as MultiHeadMask,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    NumpyMask as NumpyMask,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    make_causal_mask as make_causal_mask,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    make_chunk_attention_mask as make_chunk_attention_mask,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    make_local_attention_mask as make_local_attention_mask,
)
from ejkernel.kernels._pallas.tpu.blocksparse_attention._masks import (
    make_random_mask as make_random_mask,
)
