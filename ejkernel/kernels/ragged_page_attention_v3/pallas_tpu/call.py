"""A call over pages on TPU: one kernel for sequences with one query, one for the others."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.scipy.special import logsumexp

from ejkernel import settings
from ejkernel.kernels.common.paged import operand_dtype
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.cache import Cache, arrays_of, cache_of
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.copies import Plan
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.items import (
    PIECE,
    Items,
    flat_table,
    items,
    of_tokens,
)
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.kernel import Kernel
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.refs import Numbers, Refs
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.vectors import LANES


def attention(inputs: Inputs, spec: Spec, plans: list[Plan], vmem: list[int]) -> Outputs:
    """The results of the kernels that `plans` describe, each with so many bytes of VMEM."""
    b, t, heads, _ = inputs.query.shape
    cache = cache_of(inputs, spec)
    query = inputs.query.reshape(b * t, heads, -1)
    out = jnp.zeros((b * t, heads, cache.dims[1]), query.dtype)
    lse = jnp.full((b * t, heads), -jnp.inf, jnp.float32)
    for plan, limit in zip(plans, vmem, strict=True):
        listed = items(
            inputs,
            plan.size,
            alone=len(plans) == 1,
            block=plan.pages * cache.slots,
            slots=cache.slots,
            window=spec.sliding_window,
            cores=plan.cores,
        )
        out, by_item = _run(inputs, spec, plan, limit, cache, listed, query, out)
        lse = jnp.maximum(lse, of_tokens(listed, by_item, b * t, -jnp.inf))
    lse = jnp.swapaxes(lse.reshape(b, t, heads), 1, 2)
    return Outputs(out.reshape(b, t, heads, -1), lse)


def _run(
    inputs: Inputs,
    spec: Spec,
    plan: Plan,
    limit: int,
    cache: Cache,
    listed: Items,
    query: jax.Array,
    out: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`out` with the results of the listed tiles, and their log-sum-exps [tiles, size, n]."""
    heads = query.shape[1]
    table, per_sequence = flat_table(inputs, plan.pages, cache.pages)
    plan = plan._replace(per_sequence=per_sequence)
    parts = 1 if plan.packed else cache.heads
    rows = plan.size * heads // parts
    numbers = _numbers(inputs, spec, parts)
    given = [x for x in numbers if x is not None]
    count, lines = listed.row.shape[0], -(-rows // LANES)
    kept = scratch(inputs, plan, cache)

    def body(*refs: Any) -> None:
        left = iter(refs)
        listed_refs = Items(*itertools.islice(left, len(Items._fields)))
        table, query = next(left), next(left)
        caches = tuple(itertools.islice(left, cache.arrays))
        found = [None if x is None else next(left) for x in numbers]
        next(left)  # the zeros whose place the results take
        out, lse = next(left), next(left)
        held = dict(zip(kept, left, strict=True))
        blocks = tuple(held.pop(f"blocks{i}") for i in range(len(caches)))
        places = () if plan.packed else range(len(caches))
        ordered = tuple(held.pop(f"ordered{i}") for i in places)
        Kernel(
            plan,
            cache,
            listed_refs,
            spec,
            Refs(
                table=table,
                query=query,
                cache=caches,
                numbers=Numbers(*found),
                out=out,
                lse=lse,
                blocks=blocks,
                ordered=ordered,
                **{"own": None, "strange": None, "again": None} | held,
            ),
        ).run()

    anywhere, whole = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    operands = [table, query, *arrays_of(inputs, spec), *given, out]
    specs = [anywhere] * (2 + cache.arrays) + [whole] * len(given) + [anywhere]
    out, lse = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(listed),
            grid=(plan.cores,),
            in_specs=specs,
            out_specs=[anywhere, anywhere],
            scratch_shapes=list(kept.values()),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(out.shape, out.dtype),
            jax.ShapeDtypeStruct((count, parts, lines, LANES), jnp.float32),
        ],
        input_output_aliases={len(listed) + len(operands) - 1: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=limit,
            disable_bounds_checks=True,  # pages are within the cache, rows within their tile
        ),
        interpret=settings.interpret(),
        name="page_attention_one_query" if plan.size == 1 else "page_attention",
    )(*listed, *operands)
    lse = lse.reshape(count, parts, lines * LANES)[:, :, :rows]
    lse = lse.reshape(count, parts, plan.size, heads // parts).swapaxes(1, 2)
    return out, lse.reshape(count, plan.size, heads)


def _numbers(inputs: Inputs, spec: Spec, parts: int) -> Numbers:
    """What differs between query heads; None where nothing does."""
    heads = inputs.query.shape[2]

    def spread(x: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(x.astype(jnp.float32)[:, None], (x.shape[0], heads // x.shape[0]))
        x = x.reshape(parts, heads // parts, 1)
        return jnp.broadcast_to(x, (*x.shape[:2], LANES))

    k_scale, v_scale, sinks = inputs.k_scale, inputs.v_scale, inputs.sinks
    return Numbers(
        None if k_scale is None else spread(k_scale.astype(jnp.float32) * spec.softmax_scale),
        None if v_scale is None else spread(v_scale),
        None if sinks is None else spread(logsumexp(sinks.astype(jnp.float32), axis=-1)),
    )


def scratch(inputs: Inputs, plan: Plan, cache: Cache) -> dict[str, Any]:
    """The memory that a kernel keeps, by the names that `Refs` has for it."""
    heads, head_dim = inputs.query.shape[2:]
    parts = 1 if plan.packed else cache.heads
    rows = plan.size * heads // parts
    lines = -(-rows // LANES)
    value_dim = cache.dims[1]
    dtype = operand_dtype(inputs.query.dtype, cache.dtype)
    columns = plan.pages * cache.slots * (cache.heads if plan.packed else 1)
    held = {
        "cursor": pltpu.SMEM((6,), jnp.int32),
        "copied": pltpu.SMEM((plan.depth,), jnp.int32),
        "holes": pltpu.SMEM((plan.depth,), jnp.int32),
        "entries": pltpu.SMEM((plan.ring * max(plan.pages, PIECE),), jnp.int32),
        "queries": pltpu.VMEM((2, plan.size, heads, head_dim), inputs.query.dtype),
        "results": pltpu.VMEM((2, plan.size, heads, value_dim), inputs.query.dtype),
        "numbers_kept": pltpu.VMEM((2, parts, lines, LANES), jnp.float32),
        "rows": pltpu.VMEM((parts, rows, head_dim), dtype),
        "most": pltpu.VMEM((parts, rows, LANES), jnp.float32),
        "total": pltpu.VMEM((parts, rows, LANES), jnp.float32),
        "sums": pltpu.VMEM((parts, rows, value_dim), jnp.float32),
        "offsets": pltpu.VMEM((1, columns), jnp.int32),
    }
    if plan.packed:
        held["own"] = pltpu.VMEM((rows, columns), jnp.float32)
    if plan.packed and cache.heads > 1:
        held["strange"] = pltpu.VMEM((rows, value_dim), jnp.float32)
        held["again"] = pltpu.SMEM((1,), jnp.int32)
    for i, width in enumerate(cache.dims[: cache.arrays]):
        held[f"blocks{i}"] = pltpu.VMEM((plan.depth, plan.pages, *cache.page, width), cache.dtype)
        if not plan.packed:
            ordered = (cache.heads * cache.parts, columns, width)
            held[f"ordered{i}"] = pltpu.VMEM(ordered, dtype)
    arrivals = {
        "table_arrived": plan.ring,
        "pages_arrived": plan.depth,
        "queries_arrived": 2,
        "results_left": 2,
        "numbers_left": 2,
    }
    semaphores = {name: pltpu.SemaphoreType.DMA((count,)) for name, count in arrivals.items()}
    return held | semaphores
