"""The call: what it takes, what it means, how it becomes the inputs of flash attention."""

from collections.abc import Callable
from typing import ClassVar, Final, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ejkernel.kernels.blocksparse_attention import OP
from ejkernel.kernels.blocksparse_attention.config import BlockSparseAttentionConfig
from ejkernel.kernels.blocksparse_attention.mask_rules import rule_of_blocks, rule_of_builder
from ejkernel.kernels.blocksparse_attention.masks import Mask
from ejkernel.kernels.blocksparse_attention.split_sequence import SplitInputs
from ejkernel.kernels.common.arguments import (
    Specs,
    as_array,
    as_specs,
    check_attention_shapes,
)
from ejkernel.kernels.common.attention import (
    bias_of_rank_four,
    bound_of_logits,
    scale_of_logits,
    sinks_per_head,
)
from ejkernel.kernels.common.masking import Extent, attention_rule, chunk_rule
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.ops import executor, split_axis
from ejkernel.ops.executor import Request
from ejkernel.ops.module import BoundFunction, Module, operation
from ejkernel.ops.split_axis import SplitAxis
from ejkernel.types.arguments import SlidingWindow
from ejkernel.types.mask import MaskInfo


@operation
def blocksparse_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    softmax_aux: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    block_mask: ArrayLike | None = None,
    block_size: int | tuple[int, int] = 64,
    layout: Literal["bshd", "bhsd"] = "bshd",
    mask_info: MaskInfo | None = None,
    attention_mask: ArrayLike | None = None,
    mask_builder: Callable[..., Mask] | None = None,
    causal: bool = False,
    sliding_window: SlidingWindow | None = None,
    chunk_size: int | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: BlockSparseAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array:
    """Softmax attention in which each block of queries visits only some blocks of keys.

    A query sees a key if all of `block_mask`, `mask_info`, `attention_mask`, `mask_builder`,
    `causal`, `sliding_window` and `chunk_size` that are given allow it. Time and memory are
    proportional to the blocks that are not empty, forward and backward. The rest is as in
    `flash_attention`.

    With `axis_name` the sequences are split over a mesh axis, and positions and masks are those of
    the whole sequences. Keys and values are gathered on every device; `ring_attention` is for
    sequences whose keys do not fit. Called in a `shard_map` over `axis_name`, query, key and value
    are this device's shard: device `i` holds positions `[i * length, (i + 1) * length)`. Elsewhere
    they are whole, and are split over the axis of `mesh=`, of `jax.set_mesh`, or of a surrounding
    `with mesh:`.

    Args:
        query: `[batch, queries, heads, head_dim]`, or head-first as `layout` says.
        key: `[batch, keys, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
        value: `[batch, keys, kv_heads, value_dim]`.
        softmax_aux: attention sinks, `[sinks]` for all heads or `[heads, sinks]`.
        bias: added to the scaled logits; broadcastable to `[batch, heads, queries, keys]`. In a
            `shard_map` over `axis_name`, this device's queries by all keys.
        block_mask: True where a block of queries sees a whole block of keys: `[query blocks, key
            blocks]`, `[heads, ...]` or `[batch, 1 or heads, ...]`. It may be traced.
        block_size: queries and keys in a block of `block_mask`, one number or a pair; the last
            blocks may be shorter.
        layout: `"bshd"`, or `"bhsd"` for arrays and output with heads before the sequence.
        mask_info: a `MaskInfo`; its batch may be 1.
        attention_mask: True where a key may be seen: `[batch, keys]`, `[batch, queries, keys]` or
            `[batch, heads, queries, keys]`.
        mask_builder: `mask_builder(queries, keys, heads, head, group)` gives the `Mask` of a query
            head; `group` is how many of them share a key head.
        causal: query `q` sees keys `k <= q`.
        sliding_window: `w` or `(left, right)`: `-left <= k - q <= right`. Either may be traced, as
            where the layers of a `jax.lax.scan` differ in their windows.
        chunk_size: query and key must lie in the same chunk of this many positions, and the key
            not after the query.
        softmax_scale: by default `head_dim ** -0.5`.
        logits_soft_cap: bound of the logits.
        axis_name: the mesh axis over which the sequences are split; by default they are not.
        platform: "xla", "pallas", "triton", "cuda", or None for the best that supports the call.
        cfg: blocks of the kernel; by default chosen for the call.
        mesh: run under `shard_map` over this mesh.
        in_specs: with `mesh`, the specs of query, key and value; the others follow from them. By
            default with `axis_name`, only the sequences are split.
        out_specs: the spec of the output; it follows from `in_specs`.

    Returns:
        The output `[batch, queries, heads, value_dim]`, in `layout`, in the dtype of the query.

    Raises:
        ValueError: the arguments do not fit each other.
        UnsupportedError: the requested platform does not support the call.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import blocksparse_attention
    >>> x = jnp.ones((1, 256, 4, 32))
    >>> blocksparse_attention(x, x, x, block_mask=jnp.eye(4, dtype=bool), block_size=64).shape
    (1, 256, 4, 32)
    """
    name = OP.name
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"{name}: layout must be 'bshd' or 'bhsd', got {layout!r}.")
    arrays = (
        as_array(name, "query", query),
        as_array(name, "key", key),
        as_array(name, "value", value),
    )
    heads_first = layout == "bhsd" and all(x.ndim == 4 for x in arrays)
    query, key, value = _swapped(arrays) if heads_first else arrays
    check_attention_shapes(name, query, key, value)
    split = _split(axis_name, arrays, 2 if heads_first else 1, mesh, in_specs)
    lengths = (split.whole(query.shape[1]), split.whole(key.shape[1]))
    extent = Extent(query.shape[0], query.shape[2], *lengths)
    rule = attention_rule(
        name,
        extent,
        mask_info=mask_info,
        attention_mask=attention_mask,
        causal=causal,
        causal_offset=0,
        sliding_window=sliding_window,
    )
    if block_mask is not None:
        rule = rule & rule_of_blocks(block_mask, block_size, extent)
    if mask_builder is not None:
        group = extent.heads // key.shape[2]
        rule = rule & rule_of_builder(mask_builder, block_size, extent, group)
    inputs = (Inputs if split.name is None else SplitInputs)(
        query,
        key,
        value,
        bias=bias_of_rank_four(name, bias, extent._replace(queries=query.shape[1])),
        sinks=sinks_per_head(name, softmax_aux, extent.heads),
        mask=rule & chunk_rule(name, chunk_size),
    )
    spec = Spec(
        softmax_scale=scale_of_logits(name, softmax_scale, query.shape[3]),
        logits_soft_cap=bound_of_logits(name, logits_soft_cap),
    )
    if 0 in (*extent, value.shape[3]):
        out = jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
    else:
        given, returned = (_specs_sequence_first(x, layout) for x in (split.in_specs, out_specs))
        request = Request(platform, cfg, split.mesh, given, returned, axis_name=split.name)
        out = executor.run(OP, inputs, spec, request).out
    return _swapped(out) if layout == "bhsd" else out


def _split(
    axis_name: str | None,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    axis: int,
    mesh: Mesh | AbstractMesh | None,
    in_specs: Specs | list[PartitionSpec | None],
) -> SplitAxis:
    """Over which devices `axis` of query, key and value, as they were given, is split."""
    query, key, _ = arrays
    return split_axis.resolve(
        OP.name,
        axis_name,
        arrays=dict(zip(("query", "key", "value"), arrays, strict=True)),
        lengths={"queries": query.shape[axis], "keys": key.shape[axis]},
        specs=(PartitionSpec(*(None,) * axis, axis_name),) * 3,
        mesh=mesh,
        in_specs=in_specs,
    )


@jax.jit
def _swapped(arrays: PyTree) -> PyTree:
    """[b, n, s, d] <-> [b, s, n, d], all by one program in an eager call."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), arrays)


def _specs_sequence_first(specs: Specs | list[PartitionSpec | None], layout: str) -> Specs:
    """The specs of query, key and value, or of the output, sequence-first; others as they are."""
    if specs is None or layout == "bshd":
        return as_specs(specs)
    if isinstance(specs, PartitionSpec):
        return _with_swapped_axes(specs)
    return (*map(_with_swapped_axes, specs[:3]), *specs[3:])


def _with_swapped_axes(spec: PartitionSpec | None) -> PartitionSpec | None:
    if spec is None:
        return None
    entries = [*spec, None, None, None, None][:4]
    return PartitionSpec(entries[0], entries[2], entries[1], entries[3])


class BlockSparseAttention(Module):
    """Block-sparse attention as an object; see `blocksparse_attention`."""

    __call__: Final = BoundFunction(blocksparse_attention)
    config: ClassVar[type[BlockSparseAttentionConfig]] = BlockSparseAttentionConfig
