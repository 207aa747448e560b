"""Attention over pages on TPUs, in Pallas: one kernel for sequences with one query, one for others.

Algorithm: online softmax over pages that are copied by DMA (https://arxiv.org/abs/2309.06180).
"""

import dataclasses

import jax.numpy as jnp

from ejkernel.kernels.common.integers import next_power_of_two
from ejkernel.kernels.common.mosaic_tpu.memory import VMEM_SHARE, core_of, vmem_limit
from ejkernel.kernels.ragged_page_attention_v3.config import PagedConfig
from ejkernel.kernels.ragged_page_attention_v3.inputs import KERNEL_FEATURES, Inputs, Outputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.configs import (
    cache_layout,
    kernel_configs,
    vmem_estimate,
)
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.kernel import run_kernel
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.schedule import (
    max_tiles,
    tiles_to_tokens,
    work_list,
)
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device


def run_forward(
    inputs: Inputs, spec: Spec, params: PagedConfig, device: Device
) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    configs = kernel_configs(inputs, spec, params, device)
    layout = cache_layout(inputs, spec)
    b, t, heads, _ = inputs.query.shape
    query = inputs.query.reshape(b * t, heads, -1)
    out = jnp.zeros((b * t, heads, layout.head_dims[1]), spec.out_dtype(query.dtype))
    lse = jnp.full((b * t, heads), -jnp.inf, jnp.float32)
    for config in configs:
        work = work_list(
            inputs,
            config.tile_queries,
            all_sequences=len(configs) == 1,
            block_positions=config.block_pages * layout.page_size,
            page_size=layout.page_size,
            window=spec.sliding_window,
            cores=config.cores,
        )
        limit = vmem_limit(vmem_estimate(inputs, layout, config))
        out, tiles = run_kernel(inputs, spec, config, layout, work, limit, query, out)
        lse = jnp.maximum(lse, tiles_to_tokens(work, tiles, b * t, -jnp.inf))
    lse = jnp.swapaxes(lse.reshape(b, t, heads), 1, 2)
    outputs = Outputs(out.reshape(b, t, heads, -1), lse)
    return outputs, outputs


def heuristic(inputs: Inputs, spec: Spec, device: Device | None) -> PagedConfig:
    """The empty configuration: `kernel_configs` chooses for the device."""
    return spec.config()


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the kernels do not support a call."""
    if str(inputs.query.dtype) not in ("float32", "bfloat16"):
        return f"needs queries in float32 or bfloat16, got {inputs.query.dtype}"
    if str(inputs.key_pages.dtype) in ("float16", "float64"):
        return f"does not read a cache in {inputs.key_pages.dtype}"
    layout, core = cache_layout(inputs, spec), core_of(device)
    for config in kernel_configs(inputs, spec, spec.config(), device):
        if vmem_estimate(inputs, layout, config) > core.vmem * 0.9:
            return f"pages of {layout.page_size} tokens do not fit into VMEM"
        entries = config.table_stages * config.table_chunk
        if 4 * (6 * max_tiles(inputs, config.tile_queries) + entries) > VMEM_SHARE * core.smem:
            return "the work list of this many sequences does not fit into scalar memory"
    return None


def candidates(inputs: Inputs, spec: Spec, device: Device) -> list[PagedConfig]:
    """Blocks of half and of twice the pages, where they fit."""
    layout, found = cache_layout(inputs, spec), []
    names = {field.name for field in dataclasses.fields(spec.config)}
    name = next(x for x in ("num_kv_pages_per_block", "pages_per_compute_block") if x in names)
    (first, *_) = kernel_configs(inputs, spec, spec.config(), device)
    for pages in (first.block_pages // 2, first.block_pages * 2):
        if not 0 < pages <= next_power_of_two(inputs.page_indices.shape[-1]):
            continue
        config = dataclasses.replace(spec.config(), **{name: pages})
        kernels = kernel_configs(inputs, spec, config, device)
        budget = VMEM_SHARE * core_of(device).vmem
        if all(vmem_estimate(inputs, layout, x) <= budget for x in kernels):
            found.append(config)
    return found


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=KERNEL_FEATURES | {"float32_out"},
        why_not=why_not,
        heuristic=heuristic,
        candidates=candidates,
    ),
)
