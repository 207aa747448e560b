"""Attention over pages anywhere XLA runs: online softmax over the pages that are in use."""

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from ejkernel.kernels.common.precision import matmul
from ejkernel.kernels.ragged_page_attention_v3.config import PagedConfig
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.xla.backward import run_backward
from ejkernel.kernels.ragged_page_attention_v3.xla.tiles import PageBlock, PagedTiles, QueryTile
from ejkernel.ops.implementation import ALL_FEATURES, Implementation, Pass
from ejkernel.ops.platform import Device


def run_forward(inputs: Inputs, spec: Spec, params: PagedConfig) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    tiles = PagedTiles(inputs, spec, params.queries_per_block, params.pages_per_block)
    dtype = tiles.dtype
    b, t, heads, _ = inputs.query.shape
    query = inputs.query.reshape(b * t, heads, -1).astype(tiles.operands)
    value_dim = tiles.caches[1].shape[-1]
    sinks = None if inputs.sinks is None else logsumexp(inputs.sinks.astype(dtype), axis=-1)

    def attend(tile: QueryTile, size: int, carry: tuple) -> tuple:
        rows = tiles.rows_of(query, tile, size)

        def step(block: PageBlock, carry: tuple) -> tuple:
            acc, row_max, row_sum = carry
            logits = tiles.logits(matmul("krh,ksh->krs", rows, tiles.keys(block), dtype), size)
            logits = jnp.where(tiles.visible(tile, block), logits, -jnp.inf)
            logits = logits.reshape(*rows.shape[:2], -1)
            new_max = jnp.maximum(row_max, logits.max(-1))
            weights = jnp.exp(logits - new_max[..., None])
            alpha = jnp.exp(row_max - new_max)
            row_sum = row_sum * alpha + weights.sum(-1)
            values = tiles.used_values(block)
            products = matmul("krs,ksv->krv", weights.astype(values.dtype), values, dtype)
            return acc * alpha[..., None] + products, new_max, row_sum

        # The maximum starts at the least finite number: -inf minus that is still -inf, not NaN.
        start = (
            tiles.full((*rows.shape[:2], value_dim), 0.0),
            tiles.full(rows.shape[:2], jnp.finfo(dtype).min),
            tiles.full(rows.shape[:2], 0.0),
        )
        acc, row_max, row_sum = tiles.over_blocks(tile, step, start)
        seen = row_sum > 0
        divisor = row_sum
        if sinks is not None:
            divisor = row_sum + jnp.exp(_per_row(sinks, tiles, size) - row_max)
        result = acc / jnp.where(seen, divisor, 1.0)[..., None]
        if inputs.v_scale is not None:
            result *= inputs.v_scale.astype(dtype)[:, None, None]
        lse = jnp.where(seen, row_max + jnp.log(jnp.where(seen, row_sum, 1.0)), -jnp.inf)
        out, all_lse = carry
        return (
            tiles.put_rows(out, tile, size, result),
            tiles.put_rows(all_lse, tile, size, lse[..., None]),
        )

    start = (
        tiles.full((b * t, heads, value_dim), 0.0, spec.out_dtype(inputs.query.dtype)),
        tiles.full((b * t, heads, 1), -jnp.inf),
    )
    out, lse = tiles.over_tiles(attend, start)
    outputs = Outputs(out.reshape(b, t, heads, -1), jnp.swapaxes(lse.reshape(b, t, heads), 1, 2))
    return outputs, outputs


def _per_row(x: jax.Array, tiles: PagedTiles, size: int) -> jax.Array:
    """[1 or n], a number for each head -> one for each row of a tile, [k, size * group]."""
    x = jnp.broadcast_to(x, (tiles.heads,)).reshape(tiles.kv_heads, 1, tiles.group)
    return jnp.broadcast_to(x, (tiles.kv_heads, size, tiles.group)).reshape(tiles.kv_heads, -1)


def _heuristic(inputs: Inputs, spec: Spec, device: Device) -> PagedConfig:
    return spec.config()


IMPLEMENTATION = Implementation(
    forward=Pass(run=run_forward, features=ALL_FEATURES, heuristic=_heuristic),
    backward=Pass(run=run_backward, features=ALL_FEATURES, heuristic=_heuristic),
)
