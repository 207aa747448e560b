"""The call: what it takes, where its ring comes from, how it becomes `Inputs` and `Spec`."""

from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import as_array, check_attention_shapes
from ejkernel.kernels.common.attention import (
    bias_of_rank_four,
    bound_of_logits,
    scale_of_logits,
    sinks_per_head,
)
from ejkernel.kernels.common.attention import dropout_seed as seed_of_dropout
from ejkernel.kernels.common.masking import Extent, attention_rule, chunk_rule
from ejkernel.kernels.ring_attention import OP
from ejkernel.kernels.ring_attention.config import RingAttentionConfig
from ejkernel.kernels.ring_attention.hops import needed_hops
from ejkernel.kernels.ring_attention.inputs import METHODS, Dropout, Inputs, Method, Spec
from ejkernel.ops import executor, split_axis
from ejkernel.ops.executor import Request
from ejkernel.ops.module import BoundFunction, Module, operation
from ejkernel.ops.split_axis import SplitAxis
from ejkernel.types.arguments import SlidingWindow
from ejkernel.types.mask import MaskInfo
from ejkernel.types.placement import PLACEMENTS, Placement, length_multiple, restore
from ejkernel.types.rules import And, Everything, Segments, TokenTypes


@operation
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    *,
    axis_name: str | None = None,
    mask_info: MaskInfo | None = None,
    attention_mask: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int | ArrayLike = 0,
    sliding_window: SlidingWindow | None = None,
    chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | ArrayLike | None = None,
    placement: Placement = "contiguous",
    method: Method = "auto",
    platform: str | None = None,
    cfg: RingAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array:
    """Exact attention over sequences that are split over the devices of a mesh axis.

    The result is that of `flash_attention` on the whole sequences. Keys and values go round the
    ring, each device attends to those that are with it, and the parts are merged in float32. A hop
    that the mask makes useless is neither computed nor sent. There are two forms without a ring;
    `method` says which.

    Called in a `shard_map` over `axis_name`, arrays are this device's shard. Elsewhere they are
    whole, and are split over the axis of `mesh=`, of `jax.set_mesh`, or of a surrounding
    `with mesh:`. Without a mesh or an `axis_name` the ring has one device: XLA then gathers arrays
    that are split over automatic axes.

    Which tokens a shard holds is said by `placement`: query, key, value and output are in the order
    of `ejkernel.parallel.permute_sequence`. Masks count the positions that the tokens had before.

    Args:
        query: `[batch, queries, heads, head_dim]`.
        key: `[batch, keys, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
        value: `[batch, keys, kv_heads, value_dim]`.
        bias: broadcastable to `[batch, heads, queries, keys]`; in a `shard_map`, this device's
            queries by all keys. Rows are placed as the queries are, columns are in the order of
            positions.
        softmax_aux: attention sinks, `[sinks]` for all heads or `[heads, sinks]`.
        axis_name: the mesh axis of the ring.
        mask_info: a `MaskInfo` of the whole sequences, in the order of positions; in a `shard_map`
            segment ids of this device's shard will also do.
        attention_mask: True where a key may be seen, of the whole sequences in the order of
            positions: `[batch, keys]`, `[batch, queries, keys]` or
            `[batch, heads, queries, keys]`.
        softmax_scale: by default `head_dim ** -0.5`.
        causal: query `q` sees keys `k <= q + causal_offset`, positions counted over the ring.
        causal_offset: a number, or one per batch row.
        sliding_window: `w` or `(left, right)`: `-left <= k - q <= right`. Either may be traced, as
            where the layers of a `jax.lax.scan` differ in their windows.
        chunk_size: query and key must lie in the same chunk of this many positions, and the key
            not after the query.
        logits_soft_cap: bound of the logits.
        dropout_prob: the probability with which a weight is dropped; the others grow accordingly.
        dropout_seed: an integer or a `jax.random.key`; required with dropout. The weights that are
            dropped are those that `flash_attention` drops on the whole sequences.
        placement: "contiguous", "zigzag" (device `i` of `n` holds parts `i` and `2 n - 1 - i` of
            `2 n`: equal work under a causal mask) or "striped" (tokens `t` with `t % n == i`).
        method: "ring"; "all_gather", which gathers all keys once; "all_to_all", which exchanges the
            sequence for heads, and needs heads and kv_heads that are multiples of the ring; "auto",
            the one that a cost model expects to be fastest.
        platform: "xla", "pallas", "triton", or None for the best that supports the call.
        cfg: blocks of a hop's attention; by default chosen for the call.
        mesh: the mesh whose axis is the ring.
        in_specs: with a mesh, the specs of query, key and value; by default only the sequence is
            split, over `axis_name`.
        out_specs: the spec of the output; it follows from `in_specs`.

    Returns:
        The output `[batch, queries, heads, value_dim]` in the dtype of the query.

    Raises:
        ValueError: the arguments do not fit each other or the mesh.
        UnsupportedError: the requested platform does not support the call.

    >>> import jax, jax.numpy as jnp
    >>> from ejkernel.modules import ring_attention
    >>> x = jnp.ones((1, 128, 4, 32))
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("sp",))
    >>> ring_attention(x, x, x, axis_name="sp", causal=True, mesh=mesh).shape
    (1, 128, 4, 32)
    """
    name = OP.name
    query, key, value = (
        as_array(name, "query", query),
        as_array(name, "key", key),
        as_array(name, "value", value),
    )
    check_attention_shapes(name, query, key, value)
    _check_choice("placement", placement, PLACEMENTS)
    _check_choice("method", method, METHODS)
    split = _split(axis_name, mesh, in_specs, query, key, value)
    lengths = (split.whole(query.shape[1]), split.whole(key.shape[1]))
    whole = Extent(query.shape[0], query.shape[2], *lengths)
    rule = attention_rule(
        name,
        whole,
        mask_info=_whole_mask(mask_info, whole, split, placement),
        attention_mask=attention_mask,
        causal=causal,
        causal_offset=causal_offset,
        sliding_window=sliding_window,
    )
    rule = rule & chunk_rule(name, chunk_size)
    ours = whole._replace(queries=query.shape[1])
    inputs = Inputs(
        query,
        key,
        value,
        bias=bias_of_rank_four(name, bias, ours),
        sinks=sinks_per_head(name, softmax_aux, ours.heads),
        mask=rule,
        dropout=_dropout(dropout_prob, dropout_seed, whole),
    )
    if 0 in (*whole, value.shape[3]):
        return jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
    size = split.shards
    _check_lengths(whole, size, axis_name, placement)
    hops = needed_hops(rule, whole.queries, whole.keys, size, placement) if size > 1 else None
    spec = Spec(
        softmax_scale=scale_of_logits(name, softmax_scale, query.shape[3]),
        logits_soft_cap=bound_of_logits(name, logits_soft_cap),
        axis_name=split.name,
        placement="contiguous" if split.name is None else placement,
        method="auto" if split.name is None else method,
        hops=hops,
        dropout_prob=float(dropout_prob),
    )
    request = Request(platform, cfg, split.mesh, split.in_specs, out_specs, axis_name=split.name)
    out, _ = executor.run(OP, inputs, spec, request)
    return out


def _split(
    axis_name: Any, mesh: Any, in_specs: Any, query: jax.Array, key: jax.Array, value: jax.Array
) -> SplitAxis:
    """The ring: over which devices the sequences are split, or are to be."""
    if axis_name is None and (mesh is not None or in_specs is not None):
        raise ValueError("ring_attention: mesh= and in_specs= need axis_name=.")
    split = split_axis.resolve(
        OP.name,
        axis_name,
        arrays={"query": query, "key": key, "value": value},
        lengths={"queries": query.shape[1], "keys": key.shape[1]},
        specs=(PartitionSpec(None, axis_name),) * 3,
        mesh=mesh,
        in_specs=in_specs,
    )
    if split.given_shares and axis_name not in jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"ring_attention: axis_name {axis_name!r} is the axis of a jax.vmap; a ring needs an "
            "axis of a mesh, mapped by jax.shard_map."
        )
    return split


def _check_choice(name: str, given: Any, accepted: tuple[str, ...]) -> None:
    if given not in accepted:
        raise ValueError(
            f"ring_attention: {name} must be one of {', '.join(accepted)}, got {given!r}."
        )


def _check_lengths(whole: Extent, size: int, axis_name: Any, placement: Placement) -> None:
    parts = length_multiple(size, placement) if size > 1 else 1
    if whole.queries % parts or whole.keys % parts:
        raise ValueError(
            f"ring_attention: with placement={placement!r} over the {size} devices of "
            f"{axis_name!r}, the numbers of queries and keys must be multiples of {parts}, got "
            f"{whole.queries} and {whole.keys}."
        )


def _dropout(probability: Any, seed: Any, whole: Extent) -> Dropout | None:
    given = seed_of_dropout(OP.name, probability, seed)
    if given is None:
        return None
    rows, heads = (jnp.arange(count, dtype=jnp.int32) for count in (whole.batch, whole.heads))
    return Dropout(given, rows, heads)


def _whole_mask(mask_info: Any, whole: Extent, split: SplitAxis, placement: Placement) -> Any:
    """A mask of the whole sequences; segment ids of one shard are collected from the ring."""
    name, shards = split.name, split.shards
    if not split.given_shares or shards == 1 or not isinstance(mask_info, MaskInfo):
        return mask_info
    if (mask_info.q_len, mask_info.kv_len) != (whole.queries // shards, whole.keys // shards):
        return mask_info

    def gather(ids: jax.Array) -> jax.Array:
        ids = jax.lax.all_gather(ids, name, axis=ids.ndim - 1, tiled=True)
        return restore(ids, shards, placement, ids.ndim - 1)

    parts = mask_info.rule.rules if isinstance(mask_info.rule, And) else (mask_info.rule,)
    if not all(isinstance(part, Segments | TokenTypes | Everything) for part in parts):
        raise ValueError(
            "ring_attention: a mask_info of one device's shard may hold segment ids and token "
            "types only; say the rest by arguments, or pass a MaskInfo of the whole sequences."
        )
    rule = jax.tree.map(gather, mask_info.rule)
    return MaskInfo(rule, whole.queries, whole.keys)


class RingAttention(Module):
    """Ring attention as an object; see `ring_attention`."""

    __call__: Final = BoundFunction(ring_attention)
    config: ClassVar[type[RingAttentionConfig]] = RingAttentionConfig
