"""Documented import path; the code is in `ejkernel.kernels.blocksparse_attention.mask_info`."""

from ejkernel.kernels.blocksparse_attention.mask_info import (
    MaskInfo as MaskInfo,
)
from ejkernel.kernels.blocksparse_attention.mask_info import (
    process_dynamic_mask as process_dynamic_mask,
)
from ejkernel.kernels.blocksparse_attention.mask_info import (
    process_dynamic_mask_dkv as process_dynamic_mask_dkv,
)
from ejkernel.kernels.blocksparse_attention.mask_info import (
    process_mask as process_mask,
)
from ejkernel.kernels.blocksparse_attention.mask_info import (
    process_mask_dkv as process_mask_dkv,
)
