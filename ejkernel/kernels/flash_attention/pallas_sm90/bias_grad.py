"""The gradient of a bias on Hopper, by kernels of its own: calls without a bias pay nothing.

| the bias has | its gradient |
|---|---|
| a number for every logit | is written tile by tile |
| the same for several batch rows or heads | is added up in global memory by the one warpgroup that processes these queries of all of them, one after the other |
| one for all keys | is a sum over the tiles of a row block, for every batch row and head |
| one for all queries | is the same with transposed tiles |

The first takes no memory of its own, the second an array of the size of the bias in float32, the
others one number for every token and head, whose shared axes XLA sums. A bias of [1, 1, t, s] keeps
only t / 128 multiprocessors busy.
"""  # noqa: E501

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90.configs import (
    ROWS,
    WITHOUT_ACCUMULATORS,
    BackwardTileConfig,
    GradientKernelSpec,
)
from ejkernel.kernels.flash_attention.pallas_sm90.logits import LogitTile, broadcast_index
from ejkernel.kernels.flash_attention.pallas_sm90.schedule import WorkItems, balanced_work_list


def bias_gradient(
    run: Callable[[GradientKernelSpec, BackwardTileConfig], list[jax.Array]],
    inputs: Inputs,
    spec: Spec,
) -> jax.Array:
    """[#b, #n, #t, #s] like the bias, from the results of a kernel that `run` launches."""
    bias = inputs.bias
    if bias is None:
        raise ValueError("flash_attention: a call without a bias has no gradient of it.")
    t, s = bias.shape[2:]
    if t > 1 and s > 1:
        task = GradientKernelSpec(keys_resident=False, accumulated=(), writes_d_logits=True)
        (whole,) = run(task, WITHOUT_ACCUMULATORS)
        return whole[:, :, :t, :s].astype(bias.dtype)
    of_keys = s > 1
    task = GradientKernelSpec(keys_resident=of_keys, accumulated=(), row_sums="d_logits")
    (sums,) = run(task, WITHOUT_ACCUMULATORS)
    length = (inputs.key if of_keys else inputs.query).shape[1]
    sums = sums[..., None, :length] if of_keys else sums[..., :length, None]
    shared = [axis for axis, size in enumerate(bias.shape) if size == 1]
    total = sums.sum(shared, keepdims=True) / (1.0 - spec.dropout_prob)
    return total.astype(bias.dtype)


def shared_bias_work_list(
    count: jax.Array, items: WorkItems, bias_shape: tuple[int, ...]
) -> jax.Array:
    """A work list [waves, thread blocks] in which one thread block has all sharers of a bias row.

    Args:
        count: the number of tiles of each row block, [#b, #n, row blocks].
        items: one work item for every batch row, head and row block.
        bias_shape: [#b, #n, t, s].
    """
    row_blocks, bias_batch, bias_heads = count.shape[2], *bias_shape[:2]
    lengths = jnp.broadcast_to(count, (items.batch, items.heads, row_blocks))
    rows, heads = items.batch // bias_batch, items.heads // bias_heads  # that share
    lengths = lengths.reshape(bias_batch, rows, bias_heads, heads, row_blocks).sum((1, 3))
    thread_blocks = min(items.thread_blocks, lengths.size)
    unshared = items._replace(l2_groups=1, thread_blocks=thread_blocks)
    first = balanced_work_list(lengths.reshape(-1), unshared)  # of the first sharers
    row_block, where = first % row_blocks, first // row_blocks
    batch, head = where // bias_heads * rows, where % bias_heads * heads
    batch = batch + jnp.arange(rows * heads, dtype=jnp.int32)[:, None, None] // heads
    head = head + jnp.arange(rows * heads, dtype=jnp.int32)[:, None, None] % heads
    item = jnp.where(first >= 0, (batch * items.heads + head) * row_blocks + row_block, -1)
    return jnp.swapaxes(item, 0, 1).reshape(-1, first.shape[1])  # [waves * sharers, blocks]


def write_d_logits(
    ref: Ref,
    tile: LogitTile,
    at: Index,
    d_logits: jax.Array | None,
    batch_and_heads: tuple[int, int],
) -> None:
    """Write the gradients of a tile's logits to the gradient of the bias; None for 0.

    What batch rows or heads share is added to what the first of them has written: the same threads
    process all of them, one after the other.
    """
    batch, head = broadcast_index(ref, tile.batch, tile.head)
    columns = gpu.pl.ds(at, tile.shape[1])
    place = ref.at[batch, head, gpu.pl.ds(tile.first_row, ROWS), columns]
    sizes = zip((tile.batch, tile.head), ref.shape[:2], batch_and_heads, strict=True)
    sharing = [x for x, size, whole in sizes if size < whole]
    first = functools.reduce(lax.bitwise_and, [x == 0 for x in sharing]) if sharing else True
    zero = lambda: gpu.full(tile.shape, 0.0)
    write = lambda x: operator.setitem(place, ..., x.astype(ref.dtype))
    if d_logits is None:
        gpu.pl.when(first)(lambda: write(zero()))
        return
    if tile.has_dropout:
        d_logits = d_logits * (1.0 / (1.0 - tile.spec.dropout_prob))
    if sharing:
        load = lambda: gpu.load(place, gpu.plgpu.Layout.WGMMA)
        d_logits = d_logits + lax.cond(first, zero, load)
    write(d_logits)
