"""Named calls: two of flash attention's, under this name."""

from ejkernel.kernels.flash_attention.workloads import WORKLOADS as FLASH_WORKLOADS

_TAKEN = ("plain", "mask_pairs", "all_at_once")

WORKLOADS = tuple(workload for workload in FLASH_WORKLOADS if workload.name in _TAKEN)
CONFIGS = ()
