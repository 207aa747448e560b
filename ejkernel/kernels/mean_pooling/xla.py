"""Mean pooling on any XLA backend: one pass over the tokens, block by block.

The sums of blocks are added up, which keeps the rounding error of a long sum small.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ejkernel.kernels.common import carry
from ejkernel.kernels.common.precision import matmul
from ejkernel.kernels.mean_pooling.config import MeanPoolingConfig
from ejkernel.kernels.mean_pooling.inputs import Inputs, Outputs, Spec
from ejkernel.ops.implementation import ALL_FEATURES, Implementation, Pass
from ejkernel.ops.platform import Device


def forward(
    inputs: Inputs, spec: Spec, params: MeanPoolingConfig, device: Device
) -> tuple[Outputs, tuple[()]]:
    """The means; there are no residuals."""
    x, block = inputs.x, params.block_size
    if inputs.cu_seqlens is not None:
        sums = _sum_sequences(x, inputs.cu_seqlens, block)
    elif device.platform == "cpu" and x.dtype == _wide(x) and x.shape[1] % block == 0:
        sums = _sum_blocks(x, inputs.attention_mask, block)[:, None]
    else:
        sums = _sum_valid(x, inputs.attention_mask, block)[:, None]
    return Outputs((sums / _counts(inputs)[..., None]).astype(inputs.x.dtype)), ()


def backward(
    inputs: Inputs, _: tuple[()], d_outputs: Outputs, spec: Spec, params: MeanPoolingConfig
) -> Inputs:
    """The gradient of each mean, divided by the number of its tokens, for each of them."""
    x = inputs.x
    d_token = d_outputs.out.astype(_wide(x)) / _counts(inputs)[..., None]
    d_token = d_token.astype(x.dtype)
    if inputs.cu_seqlens is not None:
        d_x = _gather_sequences(d_token, _sequence_ids(inputs.cu_seqlens, x.shape[-2]))
    elif inputs.attention_mask is not None:
        d_x = jnp.where(inputs.attention_mask[..., None], d_token, 0)
    else:
        d_x = jnp.broadcast_to(d_token, x.shape)
    return Inputs(d_x)


def _wide(x: jax.Array) -> np.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _counts(inputs: Inputs) -> Float[Array, "*b q"]:
    """How many tokens each sequence has, at least 1."""
    tokens = inputs.x.shape[-2]
    if inputs.cu_seqlens is not None:
        counts = jnp.diff(jnp.clip(inputs.cu_seqlens, 0, tokens), axis=-1)
    elif inputs.attention_mask is not None:
        counts = inputs.attention_mask.sum(-1, keepdims=True, dtype=jnp.int32)
    else:
        counts = jnp.full((1, 1), tokens)
    return jnp.maximum(counts, 1).astype(_wide(inputs.x))


def _sum_valid(
    x: Float[Array, "b s d"], mask: Bool[Array, "b s"] | None, block: int
) -> Float[Array, "b d"]:
    """The sum of the valid tokens, block by block: no masked copy of all of `x`."""
    tokens = x.shape[1]
    size = min(block, tokens)

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        start = i * size
        at = jnp.minimum(start, tokens - size)
        valid = (at + lax.iota(jnp.int32, size) >= start)[None]
        if mask is not None:
            valid &= lax.dynamic_slice_in_dim(mask, at, size, axis=1)
        part = lax.dynamic_slice_in_dim(x, at, size, axis=1)
        return total + jnp.where(valid[..., None], part, 0).sum(1, dtype=total.dtype)

    total = carry.zeros((x.shape[0], x.shape[2]), _wide(x), x, mask)
    return lax.fori_loop(0, -(-tokens // size), step, total)


def _sum_blocks(
    x: Float[Array, "b s d"], mask: Bool[Array, "b s"] | None, block: int
) -> Float[Array, "b d"]:
    """The same for whole blocks, by a matmul with a mask of ones and zeros.

    XLA for CPUs would write a copy of what a mask selects. A NaN or an infinity among the tokens
    that are not valid makes the product a NaN: then the loop computes the sum.
    """
    batch, tokens, columns = x.shape
    blocks = x.reshape(batch, tokens // block, block, columns)
    if mask is None:
        return blocks.sum(2).sum(1)
    ones = mask.reshape(blocks.shape[:3]).astype(x.dtype)
    sums = matmul("bns,bnsd->bnd", ones, blocks).sum(1)
    return lax.cond(jnp.isfinite(sums).all(), lambda: sums, lambda: _sum_valid(x, mask, block))


def _sequence_ids(cu_seqlens: Int[Array, "*b c"], tokens: int) -> Int[Array, "*b s"]:
    """The sequence of each token, from 1 on; 0 before the first sequence."""
    index = lax.iota(cu_seqlens.dtype, tokens)
    find = jnp.vectorize(
        lambda ends: jnp.searchsorted(ends, index, side="right"), signature="(c)->(s)"
    )
    return find(cu_seqlens).astype(jnp.int32)


def _sum_sequences(
    x: Float[Array, "*b s d"], cu_seqlens: Int[Array, "*a c"], block: int
) -> Float[Array, "*lead q d"]:
    """The sums of packed sequences: first within each block, then over the blocks."""
    lead = jnp.broadcast_shapes(x.shape[:-2], cu_seqlens.shape[:-1])
    tokens, columns = x.shape[-2:]
    ids = jnp.broadcast_to(_sequence_ids(cu_seqlens, tokens), (*lead, tokens)).reshape(-1, tokens)
    each = cu_seqlens.shape[-1] + 1
    rows = ids.shape[0]
    sequence = (ids + each * lax.iota(jnp.int32, rows)[:, None]).reshape(-1)
    # Sequence and block never decrease, so each pair of them that occurs has a sum of its own.
    pair = sequence + lax.iota(jnp.int32, rows * tokens) // block
    pairs = rows * each + rows * tokens // block
    flat = jnp.broadcast_to(x, (*lead, tokens, columns)).reshape(-1, columns)
    parts = jax.ops.segment_sum(flat.astype(_wide(x)), pair, pairs, indices_are_sorted=True)
    owner = jnp.zeros(pairs, jnp.int32).at[pair].set(sequence)
    sums = jax.ops.segment_sum(parts, owner, rows * each)
    return sums.reshape(*lead, each, columns)[..., 1:-1, :]


def _gather_sequences(
    values: Float[Array, "*b q d"], sequence_ids: Int[Array, "*a s"]
) -> Float[Array, "*lead s d"]:
    """For each token the row of its sequence; 0 for tokens outside of all sequences."""
    padded = jnp.pad(values, ((0, 0),) * (values.ndim - 2) + ((1, 1), (0, 0)))
    gather = jnp.vectorize(
        lambda padded, ids: padded.at[ids].get(mode="promise_in_bounds"),
        signature="(q,d),(s)->(s,d)",
    )
    return gather(padded, sequence_ids)


def _heuristic(inputs: Inputs, spec: Spec, device: Device) -> MeanPoolingConfig:
    return MeanPoolingConfig(block_size=128, platform="xla")


def _candidates(inputs: Inputs, spec: Spec, device: Device) -> list[MeanPoolingConfig]:
    return [MeanPoolingConfig(block_size=size, platform="xla") for size in (64, 128, 256)]


IMPLEMENTATION = Implementation(
    forward=Pass(run=forward, features=ALL_FEATURES, heuristic=_heuristic, candidates=_candidates),
    backward=Pass(run=backward, features=ALL_FEATURES, heuristic=_heuristic),
)
