"""Pallas Mosaic GPU for Hopper: the parts that flash attention and grouped matmul share.

| module | holds |
|---|---|
| `versions` | what differs between JAX versions |
| `launch` | device checks, shared memory and register budgets, warp specialisation, work lists |
| `shared_memory` | matrices in shared memory, their TMA copies |
| `registers` | tiles in registers, in the layout of WGMMA accumulators |
| `engines` | matmuls: `WGMMA` on the tensor cores, `INTERPRETED` on a CPU |
| `inline_mlir` | operations on single registers, which Pallas cannot express |
"""

from ejkernel.kernels.common.mosaic_gpu import versions as versions
from ejkernel.kernels.common.mosaic_gpu.engines import INTERPRETED as INTERPRETED
from ejkernel.kernels.common.mosaic_gpu.engines import WGMMA as WGMMA
from ejkernel.kernels.common.mosaic_gpu.engines import Accumulator as Accumulator
from ejkernel.kernels.common.mosaic_gpu.engines import Accumulators as Accumulators
from ejkernel.kernels.common.mosaic_gpu.engines import InterpretedEngine as InterpretedEngine
from ejkernel.kernels.common.mosaic_gpu.engines import WgmmaEngine as WgmmaEngine
from ejkernel.kernels.common.mosaic_gpu.launch import BARRIER_RESERVE as BARRIER_RESERVE
from ejkernel.kernels.common.mosaic_gpu.launch import REDUCTION_RESERVE as REDUCTION_RESERVE
from ejkernel.kernels.common.mosaic_gpu.launch import REGISTER_FILE as REGISTER_FILE
from ejkernel.kernels.common.mosaic_gpu.launch import SHARED_MEMORY as SHARED_MEMORY
from ejkernel.kernels.common.mosaic_gpu.launch import SHARED_MEMORY_RESERVE as SHARED_MEMORY_RESERVE
from ejkernel.kernels.common.mosaic_gpu.launch import WARPGROUP as WARPGROUP
from ejkernel.kernels.common.mosaic_gpu.launch import barriers as barriers
from ejkernel.kernels.common.mosaic_gpu.launch import for_each_work_item as for_each_work_item
from ejkernel.kernels.common.mosaic_gpu.launch import is_interpreted as is_interpreted
from ejkernel.kernels.common.mosaic_gpu.launch import multiprocessors as multiprocessors
from ejkernel.kernels.common.mosaic_gpu.launch import register_budget as register_budget
from ejkernel.kernels.common.mosaic_gpu.launch import set_register_budget as set_register_budget
from ejkernel.kernels.common.mosaic_gpu.launch import specialise_warpgroups as specialise_warpgroups
from ejkernel.kernels.common.mosaic_gpu.launch import why_not_hopper as why_not_hopper
from ejkernel.kernels.common.mosaic_gpu.registers import broadcast_columns as broadcast_columns
from ejkernel.kernels.common.mosaic_gpu.registers import broadcast_rows as broadcast_rows
from ejkernel.kernels.common.mosaic_gpu.registers import broadcast_scalar as broadcast_scalar
from ejkernel.kernels.common.mosaic_gpu.registers import column_index as column_index
from ejkernel.kernels.common.mosaic_gpu.registers import column_layout as column_layout
from ejkernel.kernels.common.mosaic_gpu.registers import full as full
from ejkernel.kernels.common.mosaic_gpu.registers import reduce_rows as reduce_rows
from ejkernel.kernels.common.mosaic_gpu.registers import row_index as row_index
from ejkernel.kernels.common.mosaic_gpu.registers import row_layout as row_layout
from ejkernel.kernels.common.mosaic_gpu.shared_memory import SharedMatrices as SharedMatrices
from ejkernel.kernels.common.mosaic_gpu.shared_memory import SharedMatrixRefs as SharedMatrixRefs
from ejkernel.kernels.common.mosaic_gpu.shared_memory import swizzle_bytes as swizzle_bytes
from ejkernel.kernels.common.mosaic_gpu.shared_memory import tiled_memory as tiled_memory
from ejkernel.kernels.common.mosaic_gpu.shared_memory import transposed as transposed
from ejkernel.kernels.common.mosaic_gpu.versions import kernel as kernel
from ejkernel.kernels.common.mosaic_gpu.versions import load as load
from ejkernel.kernels.common.mosaic_gpu.versions import pl as pl
from ejkernel.kernels.common.mosaic_gpu.versions import plgpu as plgpu
