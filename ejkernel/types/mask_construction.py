"""How a `MaskInfo` is made from segment ids, masks, lengths or the inputs of a model."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel.types.arguments import (
    ArrayValues,
    as_array,
    boolean,
    choice,
    flag,
    host_values,
    integers,
    known_dtype,
    static_integer,
)
from ejkernel.types.conversion import cu_seqlens_to_mask
from ejkernel.types.mask_fields import Mask, changed
from ejkernel.types.rules import Band, Chunks, Dense, Everything, Segments
from ejkernel.types.sharding import MaskAxes

# What to do with numbers that look like a mask.
_BIAS = ", and what is added to the logits is the bias= of the operation"


def from_segments(
    cls: type[Mask],
    q_segment_ids: ArrayValues,
    kv_segment_ids: ArrayValues | None,
    q_positions: ArrayValues | None,
    kv_positions: ArrayValues | None,
    is_attn_mask: bool,
    axes: MaskAxes,
) -> Mask:
    """The mask of segments; see `MaskInfo.from_segments`."""
    where = "MaskInfo.from_segments"
    read = _ids_of_token_mask if flag(f"{where}: is_attn_mask", is_attn_mask) else integers
    q_ids = read(f"{where}: q_segment_ids", q_segment_ids, 2)
    kv_ids = q_ids
    if kv_segment_ids is not None:
        kv_ids = read(f"{where}: kv_segment_ids", kv_segment_ids, 2)
    if 1 not in (q_ids.shape[0], kv_ids.shape[0]) and q_ids.shape[0] != kv_ids.shape[0]:
        raise ValueError(
            f"{where}: q_segment_ids and kv_segment_ids must have the same batch, "
            f"got {q_ids.shape} and {kv_ids.shape}."
        )
    rule = Segments(q_ids, kv_ids).with_batch(max(q_ids.shape[0], kv_ids.shape[0]))
    mask = cls(rule, q_ids.shape[1], kv_ids.shape[1], **axes._asdict())
    return with_positions(mask, where, q_positions, kv_positions)


def from_attention_mask(
    cls: type[Mask],
    attention_mask: ArrayValues,
    q_positions: ArrayValues | None,
    kv_positions: ArrayValues | None,
    mask_is_valid: bool,
    axes: MaskAxes,
) -> Mask:
    """The mask of tokens or of pairs; see `MaskInfo.from_attention_mask`."""
    where = "MaskInfo.from_attention_mask"
    given = boolean(f"{where}: attention_mask", attention_mask, _BIAS)
    given = given if flag(f"{where}: mask_is_valid", mask_is_valid) else ~given
    if given.ndim == 2:
        ids = jnp.where(given, 0, -1).astype(jnp.int32)
        rule = Segments(ids, ids)
    elif given.ndim in (3, 4):
        rule = Dense(given[:, None] if given.ndim == 3 else given)
    else:
        raise ValueError(
            f"{where}: the mask must be (B, S), (B, Q, K) or (B, H, Q, K), got {given.shape}."
        )
    q_len = given.shape[-1] if given.ndim == 2 else given.shape[-2]
    mask = cls(rule, q_len, given.shape[-1], **axes._asdict())
    return with_positions(mask, where, q_positions, kv_positions)


def from_cu_seqlens(
    cls: type[Mask],
    cu_seqlens: tuple[ArrayValues, ArrayValues | None],
    lengths: tuple[int, int | None],
    layout: Literal["pairs", "packed"],
    positions: tuple[ArrayValues | None, ArrayValues | None],
    axes: MaskAxes,
) -> Mask:
    """The mask of sequences of queries and keys; see `MaskInfo.from_cu_seqlens`."""
    where = "MaskInfo.from_cu_seqlens"
    choice(f"{where}: format", layout, ("pairs", "packed"))
    q_len = static_integer(f"{where}: max_q_len", lengths[0], 1)
    kv_len = q_len
    if lengths[1] is not None:
        kv_len = static_integer(f"{where}: max_kv_len", lengths[1], 1)
    q_cumulative, kv_cumulative = cu_seqlens
    if kv_cumulative is None:
        kv_cumulative = q_cumulative
    ids_of = ids_of_pairs if layout == "pairs" else _ids_of_packed
    q_ids = ids_of(f"{where}: cu_seqlens_q", q_cumulative, q_len)
    kv_ids = ids_of(f"{where}: cu_seqlens_kv", kv_cumulative, kv_len)
    q_count, kv_count = np.shape(q_cumulative)[0], np.shape(kv_cumulative)[0]
    if q_count != kv_count:
        raise ValueError(
            f"{where}: cu_seqlens_q and cu_seqlens_kv must have the same length, "
            f"got {q_count} and {kv_count}."
        )
    mask = cls(Segments(q_ids, kv_ids), q_len, kv_len, **axes._asdict())
    return with_positions(mask, where, *positions)


def random_mask(shape: tuple[int, int, int, int], sparsity: float, seed: int) -> jax.Array:
    """The random mask of pairs `[b, n, t, s]` of `MaskInfo.from_random`."""
    where = "MaskInfo.from_random"
    names = ("batch_size", None, "q_len", "kv_len")
    for name, size in zip(names, shape, strict=True):
        if name is not None:
            static_integer(f"{where}: {name}", size, 0)
    if not isinstance(sparsity, int | float | np.number) or not 0 <= sparsity <= 1:
        raise ValueError(f"{where}: sparsity must be within 0 and 1, got {sparsity!r}.")
    try:
        key = jax.random.key(seed)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: seed must be an integer, got {seed!r}.") from None
    return jax.random.bernoulli(key, 1 - sparsity, shape)


def dynamic_init(
    cls: type[Mask],
    input_ids: ArrayValues | None,
    inputs_embeds: ArrayValues | None,
) -> Mask:
    """The mask in which all inputs of a model are tokens; see `MaskInfo.dynamic_init`."""
    where = "MaskInfo.dynamic_init"
    for name, array, rank in (("input_ids", input_ids, 2), ("inputs_embeds", inputs_embeds, 3)):
        if array is None:
            continue
        shape = getattr(array, "shape", None)
        if shape is None:
            shape = as_array(f"{where}: {name}", array).shape
        if len(shape) != rank:
            raise ValueError(f"{where}: {name} must have rank {rank}, got {shape}.")
        # No pair is forbidden: the ids are only there to be reported.
        ids = jnp.zeros(shape[:2], jnp.int32)
        return cls(Everything(), ids.shape[1], ids.shape[1], ids_rule=Segments(ids, ids))
    raise ValueError(
        f"{where}: give mask_info, attention_mask, input_ids or inputs_embeds; got none."
    )


def chunked_attention_mask(
    chunk_size: int, q_len: int, kv_len: int | None, offset: int, dtype: DTypeLike
) -> jax.Array:
    """The mask `[t, s]` of causal attention inside chunks."""
    where = "MaskInfo.create_chunked_attention_mask"
    rule = Chunks(static_integer(f"{where}: chunk_size", chunk_size, 1))
    offset = static_integer(f"{where}: offset", offset, -(2**31))
    q_len = static_integer(f"{where}: q_len", q_len, 0)
    kv_len = q_len if kv_len is None else static_integer(f"{where}: kv_len", kv_len, 0)
    dtype = known_dtype(f"{where}: dtype", dtype)
    return (rule & Band(None, offset)).dense(q_len, kv_len)[0].astype(dtype)


def with_positions(
    mask: Mask, where: str, q_positions: ArrayValues | None, kv_positions: ArrayValues | None
) -> Mask:
    """`mask` with the positions that are given."""
    changes: dict[str, jax.Array] = {}
    for name, given, length in (
        ("q_positions", q_positions, mask.q_len),
        ("kv_positions", kv_positions, mask.kv_len),
    ):
        if given is None:
            continue
        positions = integers(f"{where}: {name}", given, 2)
        if positions.shape[1] != length or positions.shape[0] not in (1, mask.batch_size):
            raise ValueError(
                f"{where}: {name} must have shape {(mask.batch_size, length)}, "
                f"got {positions.shape}."
            )
        changes[name] = jnp.broadcast_to(positions, (mask.batch_size, length))
    return changed(mask, **changes) if changes else mask


def ids_of_pairs(where: str, pairs: ArrayValues, length: int) -> jax.Array:
    """Ids `[b, length]` of start and end pairs `[2 b]`: 0 for tokens, -1 for padding."""
    bounds = integers(where, pairs, 1)
    if bounds.shape[0] % 2:
        raise ValueError(
            f"{where} must hold start and end pairs, got {bounds.shape[0]} numbers; cumulative "
            'lengths need format="packed".'
        )
    if (values := host_values(pairs)) is not None:
        start, end = values[0::2], values[1::2]
        if (start < 0).any() or (end < start).any() or (end > length).any():
            raise ValueError(
                f"{where} must hold pairs 0 <= start <= end <= {length}, got {values.tolist()}."
            )
    return jnp.where(cu_seqlens_to_mask(bounds, length), 0, -1).astype(jnp.int32)


def _ids_of_token_mask(where: str, mask: ArrayValues, rank: int) -> jax.Array:
    """Ids 0 for tokens, -1 for padding."""
    return integers(where, jnp.where(boolean(where, mask), 0, -1), rank)


def _ids_of_packed(where: str, cumulative: ArrayValues, length: int) -> jax.Array:
    bounds = integers(where, cumulative, 1)
    if (values := host_values(cumulative)) is not None and (
        values.size < 2 or values[0] != 0 or (values[1:] < values[:-1]).any() or values[-1] > length
    ):
        raise ValueError(
            f"{where} must begin with 0, not decrease and end by {length}, got {values.tolist()}."
        )
    token = jnp.arange(length, dtype=jnp.int32)
    sequence = jnp.searchsorted(bounds, token, side="right") - 1
    return jnp.where(token < bounds[-1], sequence, -1).astype(jnp.int32)[None]
