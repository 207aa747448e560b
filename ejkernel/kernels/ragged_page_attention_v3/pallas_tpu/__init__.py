"""Attention over pages on TPUs, in Pallas: what it takes, and blocks that fit into VMEM."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.mosaic_tpu.memory import MEBIBYTE, core_of, vmem_bytes
from ejkernel.kernels.common.paged import operand_dtype
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.cache import Cache, cache_of
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.call import attention, scratch
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.copies import Plan
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.items import PIECE, most_items
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.vectors import LANES
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device, device_of

# Of keys and values in a block, packed: the copies of a few such blocks hide how long one takes.
_BLOCK, _COLUMNS = 2 * MEBIBYTE, 4096
_POSITIONS = 512  # of a block, where keys and values are put in order by head
_ROWS = 512  # queries and heads on one key head, where there are many queries
_FEW = 64  # rows that meet all heads' keys at once
_DEPTH = 4  # blocks in VMEM
_SHARE = 0.6  # of VMEM and SMEM; the compiler needs some for itself

# Chips whose two cores share one memory and one program.
_PAIRED = ("TPU v4", "TPU v5p", "TPU v5")
_ALONE = ("TPU v4 lite", "TPU v5 lite", "TPU v5e")


def run_forward(inputs: Inputs, spec: Spec, params: Any) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    plans = plans_of(inputs, spec, params, device_of(jax.tree.leaves(inputs)))
    cache = cache_of(inputs, spec)
    vmem = [max(16 * MEBIBYTE, int(_bytes(inputs, cache, x) / _SHARE * 0.9)) for x in plans]
    outputs = attention(inputs, spec, plans, vmem)
    return outputs, outputs


def plans_of(inputs: Inputs, spec: Spec, params: Any, device: Device | None) -> list[Plan]:
    """A plan for sequences with one query and one for the others, that fit into VMEM."""
    cache = cache_of(inputs, spec)
    t, heads = inputs.query.shape[1:3]
    queries = params.queries_per_block
    if queries is None:
        queries = min(max(8, _ROWS * cache.heads // heads), _power(t))
    sizes = (1,) if t == 1 else (1, max(queries, 2))
    return [_fitting(inputs, spec, cache, size, params.pages_per_block, device) for size in sizes]


def _fitting(
    inputs: Inputs, spec: Spec, cache: Cache, size: int, pages: int | None, device: Device | None
) -> Plan:
    """The plan for tiles of this size: smaller blocks, then fewer of them, until they fit."""
    packed = size * inputs.query.shape[2] <= _FEW or size == 1
    kind = "" if device is None else device.kind
    plan = Plan(
        size=size,
        pages=_power(pages or _most_pages(inputs, cache, packed)),
        depth=_DEPTH,
        packed=packed,
        cores=2 if kind.startswith(_PAIRED) and not kind.startswith(_ALONE) else 1,
        per_sequence=0,
        window=spec.sliding_window,
    )
    budget = _SHARE * core_of(device).vmem
    rows = size * inputs.query.shape[2] // cache.heads
    # What is given up first, and down to where: queries, pages, then more of both, then depth.
    for name, least in (
        ("size", size if packed else max(2, size * 128 // rows)),
        ("pages", plan.pages if pages else min(plan.pages, max(1, 128 // cache.slots))),
        ("size", size if packed else 2),
        ("depth", 3),
        ("pages", plan.pages if pages else 1),
        ("depth", 2),
    ):
        while getattr(plan, name) > least and _bytes(inputs, cache, plan) > budget:
            now = getattr(plan, name)
            plan = plan._replace(**{name: now - 1 if name == "depth" else max(least, now // 2)})
    return plan


def _most_pages(inputs: Inputs, cache: Cache, packed: bool) -> int:
    """As many pages as a good block has, and the table at most."""
    page = cache.slots * cache.heads * sum(cache.dims) * jnp.dtype(cache.dtype).itemsize
    pages = min(_BLOCK // page, _COLUMNS // (cache.slots * cache.heads))
    pages = max(1, pages if packed else _POSITIONS // cache.slots)
    pages = _power(pages + 1) // 2  # the power of two below
    return min(pages, _power(inputs.page_indices.shape[-1]))


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _bytes(inputs: Inputs, cache: Cache, plan: Plan) -> int:
    """What a kernel takes in VMEM: what it keeps, and what a step makes on the way."""
    held = scratch(inputs, plan, cache).values()
    kept = sum(vmem_bytes(x.shape, x.dtype) for x in held if str(x.memory_space) == "vmem")
    dtype = operand_dtype(inputs.query.dtype, cache.dtype)
    heads = inputs.query.shape[2]
    rows = plan.size * heads // (1 if plan.packed else cache.heads)
    columns = plan.pages * cache.slots * (cache.heads if plan.packed else 1)
    tiles = 4 * vmem_bytes((min(rows, 256), columns), jnp.float32)
    width = max(cache.dims)
    block = 2 * vmem_bytes((plan.pages * cache.rows, width), dtype)
    results = 2 * vmem_bytes((plan.size * heads, width), jnp.float32)
    numbers = 3 * vmem_bytes((heads, LANES), jnp.float32)
    return kept + tiles + block + results + numbers


def heuristic(inputs: Inputs, spec: Spec, device: Device | None) -> Any:
    """Everything is left open: `plans_of` knows the device."""
    return spec.config()


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """What the kernels do not compute."""
    if str(inputs.query.dtype) not in ("float32", "bfloat16"):
        return f"needs queries in float32 or bfloat16, got {inputs.query.dtype}"
    if str(inputs.key_pages.dtype) in ("float16", "float64"):
        return f"does not read a cache in {inputs.key_pages.dtype}"
    cache, core = cache_of(inputs, spec), core_of(device)
    for plan in plans_of(inputs, spec, spec.config(), device):
        if _bytes(inputs, cache, plan) > core.vmem * 0.9:
            return f"has no room in VMEM for pages of {cache.slots} tokens"
        entries = plan.ring * max(plan.pages, PIECE)
        if 4 * (6 * most_items(inputs, plan.size) + entries) > _SHARE * core.smem:
            return "has no room in scalar memory for a list of so many sequences"
    return None


def candidates(inputs: Inputs, spec: Spec, device: Device) -> list[Any]:
    """Blocks of half and of twice the pages, where they fit."""
    cache, found = cache_of(inputs, spec), []
    names = {field.name for field in dataclasses.fields(spec.config)}
    name = next(x for x in ("num_kv_pages_per_block", "pages_per_compute_block") if x in names)
    (first, *_) = plans_of(inputs, spec, spec.config(), device)
    for pages in (first.pages // 2, first.pages * 2):
        if not 0 < pages <= _power(inputs.page_indices.shape[-1]):
            continue
        config = dataclasses.replace(spec.config(), **{name: pages})
        plans = plans_of(inputs, spec, config, device)
        if all(_bytes(inputs, cache, x) <= _SHARE * core_of(device).vmem for x in plans):
            found.append(config)
    return found


_FEATURES = frozenset(
    {
        "k_scale",
        "kv_layout",
        "logits_soft_cap",
        "sinks",
        "sliding_window",
        "v_scale",
    }
)

IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=_FEATURES,
        why_not=why_not,
        heuristic=heuristic,
        candidates=candidates,
    ),
)
