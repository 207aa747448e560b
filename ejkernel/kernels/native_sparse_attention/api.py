"""The call: what it takes, what it means, how it becomes `Inputs` and `Spec`."""

import dataclasses
import functools
import operator
from typing import Any, ClassVar, Final, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import (
    as_array,
    check_attention_shapes,
    check_floating,
    cumulative_lengths,
    integer_array,
    known_values,
    window_length,
)
from ejkernel.kernels.common.attention import scale_of_logits
from ejkernel.kernels.native_sparse_attention import OP, SELECTION
from ejkernel.kernels.native_sparse_attention.config import NativeSparseAttentionConfig
from ejkernel.kernels.native_sparse_attention.inputs import Inputs, SelectionInputs, Spec
from ejkernel.kernels.native_sparse_attention.selection import select_blocks
from ejkernel.kernels.native_sparse_attention.split_sequence import (
    SplitInputs,
    SplitSelectionInputs,
)
from ejkernel.ops import executor, split_axis
from ejkernel.ops.executor import Request
from ejkernel.ops.meshes import axes_size, entry_axes
from ejkernel.ops.module import BoundFunction, Module, operation
from ejkernel.ops.platform import device_of
from ejkernel.ops.sharded import from_types
from ejkernel.ops.split_axis import SplitAxis

_NAME = OP.name


@overload
def native_sparse_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    g_cmp: ArrayLike | None = None,
    g_slc: ArrayLike | None = None,
    g_swa: ArrayLike | None = None,
    block_indices: ArrayLike | None = None,
    block_counts: int | ArrayLike = 16,
    cu_seqlens: ArrayLike | None = None,
    *,
    block_size: int = 64,
    sliding_window: int | ArrayLike | None = None,
    softmax_scale: float | None = None,
    return_block_indices: Literal[False] = False,
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: NativeSparseAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array: ...


@overload
def native_sparse_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    g_cmp: ArrayLike | None = None,
    g_slc: ArrayLike | None = None,
    g_swa: ArrayLike | None = None,
    block_indices: ArrayLike | None = None,
    block_counts: int | ArrayLike = 16,
    cu_seqlens: ArrayLike | None = None,
    *,
    block_size: int = 64,
    sliding_window: int | ArrayLike | None = None,
    softmax_scale: float | None = None,
    return_block_indices: Literal[True],
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: NativeSparseAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@operation
def native_sparse_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    g_cmp: ArrayLike | None = None,
    g_slc: ArrayLike | None = None,
    g_swa: ArrayLike | None = None,
    block_indices: ArrayLike | None = None,
    block_counts: int | ArrayLike = 16,
    cu_seqlens: ArrayLike | None = None,
    *,
    block_size: int = 64,
    sliding_window: int | ArrayLike | None = None,
    softmax_scale: float | None = None,
    return_block_indices: bool = False,
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: NativeSparseAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention over chosen blocks of keys, with a compressed view and a window; always causal.

        output = g_slc * selected + g_cmp * compressed + g_swa * windowed

    Each branch is softmax attention of a token `t` over its sequence up to `t` itself: `selected`
    over the keys of its blocks, `compressed` over the mean key (and value) of each block that is
    complete by `t`, `windowed` over the newest keys. A branch in which a token sees nothing gives
    exactly 0. Query head `i` uses key head `i // (heads // kv_heads)`.

    With `axis_name` the sequences are split over a mesh axis; blocks and `cu_seqlens` count the
    tokens of the whole row. Keys and values are gathered on every device, and only XLA supports it.
    Called in a `shard_map` over `axis_name`, all other arrays are this device's shard: device `i`
    holds positions `[i * length, (i + 1) * length)`. Elsewhere they are whole, and are split over
    the axis of `mesh=`, of `jax.set_mesh`, or of a surrounding `with mesh:`.

    Args:
        query: `[batch, length, heads, head_dim]`; with `cu_seqlens` every array may come without
            the batch.
        key: `[batch, length, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
        value: `[batch, length, kv_heads, value_dim]`.
        g_cmp: gate of the compressed branch, `[batch, length, heads]`; without it there is none.
        g_slc: gate of the selected branch; by default 1.
        g_swa: gate of the window branch, by default 1; it needs `sliding_window`.
        block_indices: the blocks of each token, `[batch, length, kv_heads, n]`, or `[batch, length,
            n]` for all heads; or one list for each `block_size` tokens, `[batch, lists, kv_heads,
            n]` or `[batch, kv_heads, lists, n]`. A shape that fits several is read as the first of
            them. Block `i` is the keys `i * block_size` up to the next, from the start of the
            token's sequence. Blocks named twice count once; -1 and whatever else is no block of the
            sequence counts for nothing. By default the blocks that the compressed branch weighs
            most.
        block_counts: how many entries of each list count, an int or an array shaped as
            `block_indices` without its last axis; more than there are means all. Without
            `block_indices`: how many blocks to choose.
        cu_seqlens: `[0, l1, l1 + l2, ...]`, sequences packed into one row.
        block_size: keys in a block.
        sliding_window: the window branch sees this many of the newest keys, the token's own
            included; without it there is no window branch. It may be traced.
        softmax_scale: by default `head_dim ** -0.5`.
        return_block_indices: also return the blocks, for another call.
        axis_name: the mesh axis over which the sequences are split; by default they are not.
        platform: "xla", "triton", or None for the best that supports the call.
        cfg: tiles and launch parameters; by default chosen for the call.
        mesh: run under `shard_map` over this mesh.
        in_specs: with `mesh`, the specs of query, key and value, and of gates if they are to be
            checked; the others follow from them. By default with `axis_name`, only the sequences
            are split.
        out_specs: the spec of the output; it follows from `in_specs`.

    Returns:
        The output `[batch, length, heads, value_dim]` in the dtype of the query. With
        `return_block_indices` a pair of it and the blocks that counted, `[batch, length, kv_heads,
        n]`, -1 where there is none. Blocks chosen here are the token's own, then those complete by
        it by falling softmax weight summed over the query heads of a key head, of equal ones the
        earlier first. No gradient flows through the choice.

    Raises:
        ValueError: the arguments do not fit each other.
        UnsupportedError: the requested platform does not support the call.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import native_sparse_attention
    >>> x = jnp.ones((1, 256, 2, 8))
    >>> blocks = jnp.array([0, 3]) * jnp.ones((1, 256, 2, 1), int)
    >>> native_sparse_attention(x, x, x, block_indices=blocks).shape
    (1, 256, 2, 8)
    """
    query = as_array(_NAME, "query", query)
    packed_rank = cu_seqlens is not None and query.ndim == 3
    query, key, value = (
        _batched(as_array(_NAME, name, x), packed_rank)
        for name, x in (("query", query), ("key", key), ("value", value))
    )
    check_attention_shapes(_NAME, query, key, value)
    if key.shape[1] != query.shape[1]:
        raise ValueError(
            f"{_NAME}: query and key must have one length, got {query.shape[1]} and {key.shape[1]}."
        )
    window, traced_window = window_length(_NAME, sliding_window)
    spec = _spec(query.shape[3], block_size, window, softmax_scale, cfg)
    gates = {
        name: _gate(name, gate, query, packed_rank)
        for name, gate in (("g_cmp", g_cmp), ("g_slc", g_slc), ("g_swa", g_swa))
    }
    if g_swa is not None and sliding_window is None:
        raise ValueError(f"{_NAME}: g_swa needs sliding_window.")
    split = _split(axis_name, query, key, value, mesh, in_specs)
    cu_seqlens = _cumulative(cu_seqlens, query, split.whole(query.shape[1]))
    request = Request(platform, cfg, split.mesh, split.in_specs, out_specs, axis_name=split.name)
    shares = split.shards if split.given_shares else 1
    lists = _Lists(query.shape[0], query.shape[1], key.shape[2], spec.block_size, shares)
    if block_indices is None:
        if not isinstance(query.shape[1], int):
            raise ValueError(
                "native_sparse_attention: choosing blocks needs a known length, got "
                f"{query.shape[1]}; give block_indices=."
            )
        count = min(_count(block_counts), lists.blocks_of_all)
        chosen = _selected(query, key, cu_seqlens, spec, count, request)
    else:
        indices = _batched(integer_array(_NAME, "block_indices", block_indices), packed_rank)
        chosen = _counted(lists.indices(indices), block_counts, lists, packed_rank)
    if 0 in (*query.shape, value.shape[3]):
        out = jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
    else:
        # Lists without an entry say what an entry of no block says.
        named = chosen if chosen.shape[-1] else jnp.full((*chosen.shape[:3], 1), -1, jnp.int32)
        inputs = (Inputs if split.name is None else SplitInputs)(
            query,
            key,
            value,
            named,
            **gates,
            cu_seqlens=cu_seqlens,
            traced_window=traced_window,
        )
        out = executor.run(OP, inputs, spec, request).out
    if packed_rank:
        out, chosen = out[0], chosen[0]
    return (out, chosen) if return_block_indices else out


def _selected(
    query: jax.Array,
    key: jax.Array,
    cu_seqlens: jax.Array | None,
    spec: Spec,
    count: int,
    request: Request,
) -> jax.Array:
    """The blocks of each token, its own first, then by falling score; no gradient flows."""
    if 0 in (count, *query.shape[:3]):
        return jnp.full((*query.shape[:2], key.shape[2], count), -1, jnp.int32)
    query, key = jax.lax.stop_gradient((query, key))
    if request.axis_name is None:
        query, key = _split_alike(query, key)
    group = query.shape[2] // key.shape[2]
    by_group = query.reshape(*query.shape[:2], key.shape[2], group, query.shape[3])
    places: Any = np.arange(count, dtype=np.int32)  # by JAX it would be a program of its own
    spec = dataclasses.replace(spec, sliding_window=None)
    if request.axis_name is not None:
        inputs = SplitSelectionInputs(by_group, key, places, cu_seqlens)
        specs = _without_heads(request.in_specs)
        request = Request("xla", mesh=request.mesh, in_specs=specs, axis_name=request.axis_name)
        return executor.run(SELECTION, inputs, spec, request).blocks
    inputs = SelectionInputs(by_group, key, places, cu_seqlens)
    # A mesh may split the query heads of a key head, which choose together.
    typed = from_types([query, key]) is not None
    if request.mesh is not None or request.in_specs is not None or typed:
        return select_blocks(inputs, spec)
    platform = _selection_platform(inputs, spec, request)
    return executor.run(SELECTION, inputs, spec, Request(platform)).blocks


def _split_alike(query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Query and key with explicit axes split in the same way, over batch and key heads.

    JAX's matmuls need it. Query heads that are split further are gathered: those of a key head
    choose together.
    """
    found = from_types([query, key])
    if found is None:
        return query, key
    mesh, given = found
    of_query, of_key = ((*spec, None, None, None)[:3] for spec in given.specs)
    batch, heads = of_query[0] or of_key[0], of_query[2] or of_key[2]
    over = entry_axes(heads)
    if key.shape[2] % axes_size(mesh, over) or set(over) & set(entry_axes(batch)):
        heads = None
    alike = NamedSharding(mesh, PartitionSpec(batch, None, heads))
    return jax.sharding.reshard(query, alike), jax.sharding.reshard(key, alike)


def _selection_platform(inputs: SelectionInputs, spec: Spec, request: Request) -> str | None:
    """The platform named for the attention, or None if it does not support this selection."""
    named = request.platform
    if named in (None, "auto") and isinstance(request.cfg, NativeSparseAttentionConfig):
        named = request.cfg.platform
    device = device_of(jax.tree.leaves(inputs))
    supported, _ = SELECTION.supporting("forward", inputs, spec, device, named)
    return named if supported else None


def _without_heads(in_specs: object) -> object:
    """The specs of query and key with whole heads: those of a key head choose together."""
    if not isinstance(in_specs, tuple | list):
        return in_specs
    return tuple(None if spec is None else PartitionSpec(*spec[:2]) for spec in in_specs[:2])


@functools.partial(jax.jit, static_argnums=1)
def _known_blocks(x: jax.Array, blocks: int) -> jax.Array:
    """Indices as int32, -1 for those of no block."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.int32))
    return jnp.where((x >= 0) & (x < blocks), x, -1).astype(jnp.int32)


class _Lists(NamedTuple):
    """What lists of blocks may look like: for each token, or for each `block_size` of them.

    There are `shares` times as many tokens in all, the others on other devices.
    """

    batch: int
    length: int
    kv_heads: int
    block_size: int
    shares: int = 1

    @property
    def blocks(self) -> int:
        return -(-self.length // self.block_size)

    @property
    def blocks_of_all(self) -> int:
        return -(-self.length * self.shares // self.block_size)

    def indices(self, x: jax.Array) -> jax.Array:
        """Lists in any of their shapes as int32 [b, t, k, n]."""
        if x.ndim < 3 or not jnp.issubdtype(x.dtype, jnp.integer):
            raise self._refuse("block_indices", x, ", n")
        return _known_blocks(self._per_token("block_indices", x, ", n"), self.blocks_of_all)

    def counts(self, x: jax.Array) -> jax.Array:
        """Counts in any of their shapes as [b, t, k]."""
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise self._refuse("block_counts", x, "")
        return self._per_token("block_counts", x[..., None], "")[..., 0]

    def _per_token(self, name: str, x: jax.Array, last: str) -> jax.Array:
        b, t, k, blocks = self.batch, self.length, self.kv_heads, self.blocks
        shape = x.shape[:-1]
        if shape == (b, t):
            x = x[:, :, None]
        elif shape == (b, k, blocks) and shape not in ((b, t, k), (b, blocks, k)):
            x = jnp.swapaxes(x, 1, 2)
        elif shape not in ((b, t, k), (b, blocks, k)):
            raise self._refuse(name, x[..., 0] if not last else x, last)
        if x.shape[1] != t:
            if self.shares > 1 and t % self.block_size:
                raise ValueError(
                    f"{_NAME}: {name} for blocks of {self.block_size} tokens need shares of whole "
                    f"blocks, and a device has {t} tokens; give one list for each token."
                )
            x = jnp.repeat(x, self.block_size, axis=1)[:, :t]
        return jnp.broadcast_to(x, (b, t, k, x.shape[-1]))

    def _refuse(self, name: str, x: jax.Array, last: str) -> ValueError:
        b, t, k, blocks = self.batch, self.length, self.kv_heads, self.blocks
        shapes = ((b, t, k), (b, t), (b, blocks, k), (b, k, blocks))
        allowed = ", ".join(f"[{', '.join(map(str, shape))}{last}]" for shape in shapes)
        return ValueError(
            f"{_NAME}: {name} must be integers of shape {allowed}, got {x.dtype}{list(x.shape)}."
        )


def _counted(indices: jax.Array, counts: Any, lists: _Lists, packed_rank: bool) -> jax.Array:
    """The lists with only as many entries as count."""
    if not isinstance(counts, jax.Array | np.ndarray | list | tuple):
        return indices[..., : _count(counts)]
    values, counts = known_values(counts), integer_array(_NAME, "block_counts", counts)
    if values is not None and values.size and values.min() < 0:
        raise ValueError(f"{_NAME}: block_counts must not be negative, got {values.min()}.")
    if counts.ndim:
        counts = lists.counts(_batched(counts, packed_rank))[..., None]
    return jnp.where(jnp.arange(indices.shape[-1]) < counts, indices, -1)


def _count(counts: Any) -> int:
    known = known_values(counts) if isinstance(counts, jax.Array) else counts
    try:
        count = operator.index(known)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(
            f"{_NAME}: block_counts must be an int known at trace time, or, with block_indices, "
            f"an array of integers; got {counts!r}."
        ) from None
    if count < 0:
        raise ValueError(f"{_NAME}: block_counts must not be negative, got {count}.")
    return count


def _batched(x: jax.Array, packed_rank: bool) -> jax.Array:
    return x[None] if packed_rank else x


def _gate(name: str, gate: Any, query: jax.Array, packed_rank: bool) -> jax.Array | None:
    if gate is None:
        return None
    gate = _batched(as_array(_NAME, name, gate), packed_rank)
    check_floating(_NAME, name, gate.dtype)
    if gate.shape != query.shape[:3]:
        raise ValueError(
            f"{_NAME}: {name} must be [batch, length, heads] = {list(query.shape[:3])}, "
            f"got {list(gate.shape)}."
        )
    return gate


def _spec(head_dim: int, block_size: Any, window: int | None, scale: Any, cfg: Any) -> Spec:
    block_size = _positive("block_size", block_size)
    if isinstance(cfg, NativeSparseAttentionConfig) and cfg.block_size != block_size:
        raise ValueError(
            f"{_NAME}: block_size={block_size} and cfg.block_size={cfg.block_size} differ; give "
            "both."
        )
    return Spec(
        softmax_scale=scale_of_logits(_NAME, scale, head_dim),
        block_size=block_size,
        sliding_window=window,
    )


def _positive(name: str, x: Any) -> int:
    try:
        number = operator.index(x)
    except (TypeError, jax.errors.ConcretizationTypeError):
        raise ValueError(f"{_NAME}: {name} must be an int, got {x!r}.") from None
    if number < 1:
        raise ValueError(f"{_NAME}: {name} must be positive, got {number}.")
    return number


def _split(
    axis_name: str | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mesh: Mesh | AbstractMesh | None,
    in_specs: tuple[PartitionSpec | None, ...] | None,
) -> SplitAxis:
    """Over which devices the sequences are split, or are to be."""
    return split_axis.resolve(
        _NAME,
        axis_name,
        arrays={"query": query, "key": key, "value": value},
        lengths={"tokens": query.shape[1]},
        specs=(PartitionSpec(None, axis_name),) * 3,
        mesh=mesh,
        in_specs=in_specs,
    )


def _cumulative(cum: Any, query: jax.Array, length: int) -> jax.Array | None:
    if cum is None:
        return None
    if query.shape[0] != 1:
        raise ValueError(
            f"{_NAME}: cu_seqlens describe one packed row, got a batch of {query.shape[0]}."
        )
    return cumulative_lengths(_NAME, "cu_seqlens", cum, length)


class NativeSparseAttention(Module):
    """Native sparse attention as an object; see `native_sparse_attention`."""

    __call__: Final = BoundFunction(native_sparse_attention)
    config: ClassVar[type[NativeSparseAttentionConfig]] = NativeSparseAttentionConfig
