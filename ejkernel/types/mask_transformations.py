"""Masks made from masks: causal, windows, chunks, token types, lengths, other representations."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel.types import mask_ids
from ejkernel.types.arguments import choice, integers, static_integer, window_pair
from ejkernel.types.conversion import KEY_PADDING_POSITION
from ejkernel.types.mask_base import Self
from ejkernel.types.mask_properties import MaskProperties
from ejkernel.types.rules import Band, Chunks, KeyLength, TokenTypes, ZeroPolicy


class MaskTransformations(MaskProperties):
    """Everything that gives a new mask. None of it makes anything of size Q x K."""

    def apply_causal(self, offset: Any = 0) -> Self:
        """Let query q see keys up to `q + offset`: `k <= q + offset`, counted from the top left.

        Args:
            offset: an integer, or one per batch row `(B,)`; positive reveals later keys.

        Returns:
            The mask, ids and positions unchanged.

        Raises:
            ValueError: if `offset` is neither an integer nor one per batch row.

        >>> from ejkernel.types import MaskInfo
        >>> mask = MaskInfo.from_segments(jnp.zeros((1, 3), int)).apply_causal()
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        """
        mask, offset = self._with_numbers("apply_causal: offset", offset)
        return mask._restricted(Band(None, offset))

    def apply_sliding_window(
        self,
        sliding_window: Any,
        *,
        offset: Any = 0,
        mode: Literal["default", "decode", "prefill"] | None = None,
        index: Any = None,
    ) -> Self:
        """Let query q see `left` keys before `q + offset`, that key, and `right` keys after it.

        `q + offset - left <= k <= q + offset + right`.

        Args:
            sliding_window: a pair `(left, right)`, or one number for both sides.
            offset: an integer, or one per batch row `(B,)`.
            mode: `"decode"` keeps query `index` and the `left + right + 1` keys around its window;
                `"prefill"` keeps all queries and the last `left + right + 1` keys, for a single
                number `w` the last `w`; `"default"`, like None, keeps everything.
            index: the query to keep, an integer or one per batch row; for `"decode"` only.

        Returns:
            The mask. Where it was cut, its ids and positions are cut with it.

        Raises:
            ValueError: if the window is negative or no pair, the mode unknown, or `index` missing
                or out of place.

        >>> from ejkernel.types import MaskInfo
        >>> mask = MaskInfo.from_segments(jnp.zeros((1, 4), int)).apply_sliding_window((1, 0))
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
        """
        name = "apply_sliding_window"
        left, right = window_pair(f"MaskInfo.{name}: sliding_window", sliding_window)
        choice(f"MaskInfo.{name}: mode", mode, (None, "default", "decode", "prefill"))
        if (mode == "decode") != (index is not None):
            raise ValueError(f'MaskInfo.{name}: mode="decode" and index go together.')
        mask, offset = self._with_numbers(f"{name}: offset", offset)
        mask = mask._restricted(Band(offset - left, offset + right))
        width = min(left + right + 1, mask.kv_len)
        if mode == "decode":
            mask, index = mask._with_numbers(f"{name}: index", index)
            query = _clip(index, 0, mask.q_len - 1)
            key = _clip(query + offset - left, 0, mask.kv_len - width)
            return mask._sliced(query, 1, key, width)
        if mode == "prefill":
            if not isinstance(sliding_window, tuple | list):
                width = max(1, min(left, mask.kv_len))
            return mask._sliced(0, mask.q_len, mask.kv_len - width, width)
        return mask

    def apply_chunked(self, chunk_size: Any, offset: Any = 0) -> Self:
        """Let each query see the keys of its own chunk up to itself.

        `q // chunk_size == k // chunk_size` and `k <= q + offset`.

        Args:
            chunk_size: an integer, or one per batch row `(B,)`.
            offset: an integer, or one per batch row `(B,)`.

        Returns:
            The mask. It reports chunk numbers, from 1, as its segment ids; segments still hold.

        Raises:
            ValueError: if `chunk_size` is not positive.

        >>> from ejkernel.types import MaskInfo
        >>> mask = MaskInfo.from_segments(jnp.zeros((1, 4), int)).apply_chunked(2)
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
        >>> mask.q_segment_ids.tolist()
        [[1, 1, 2, 2]]
        """
        mask, size = self._with_numbers("apply_chunked: chunk_size", chunk_size)
        mask, offset = mask._with_numbers("apply_chunked: offset", offset)
        if isinstance(size, int) and size < 1:
            raise ValueError(f"MaskInfo.apply_chunked: chunk_size must be positive, got {size}.")
        if not isinstance(size, int):
            size = jnp.maximum(size, 1)
        q_valid, kv_valid = mask._valid()
        return mask._restricted(
            Chunks(size) & Band(None, offset),
            q_ids=_chunk_numbers(q_valid, size),
            kv_ids=_chunk_numbers(kv_valid, size),
        )

    def apply_token_type_ids(
        self,
        token_type_ids: Any,
        *,
        combine: Literal["union", "intersect", "replace"] = "union",
        zero_policy: ZeroPolicy = "q",
        update_segment_ids: bool | None = None,
    ) -> Self:
        """Let tokens of the same type see each other.

        Args:
            token_type_ids: types `(B, S)` of queries and keys alike, or a pair `((B, Q), (B, K))`.
            combine: `"union"` allows what the mask or the types allow, `"intersect"` what both
                allow, `"replace"` what the types allow.
            zero_policy: whose type 0 is padding: that of queries `"q"`, of keys `"kv"`, of
                `"both"`, or of `"none"`, where 0 is a type like any other.
            update_segment_ids: report the types as segment ids; by default unless a union, which
                ids cannot say.

        Returns:
            The mask.

        Raises:
            ValueError: if the shape, `combine` or `zero_policy` will not do.

        >>> from ejkernel.types import MaskInfo
        >>> mask = MaskInfo.from_segments(jnp.zeros((1, 3), int)).apply_causal()
        >>> mask = mask.apply_token_type_ids(jnp.array([[1, 1, 0]]), combine="union")
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
        """
        where = "MaskInfo.apply_token_type_ids"
        choice(f"{where}: combine", combine, ("union", "intersect", "replace"))
        choice(f"{where}: zero_policy", zero_policy, ("q", "kv", "both", "none"))
        pair = token_type_ids if isinstance(token_type_ids, tuple) else (token_type_ids,) * 2
        if len(pair) != 2:
            raise ValueError(f"{where}: a tuple of token types must be a pair, got {len(pair)}.")
        q_types, mask = self._types(where, pair[0], self.q_len)
        kv_types, mask = mask._types(where, pair[1], mask.kv_len)
        if kv_types.ndim == 2:
            q_types = jnp.broadcast_to(q_types, (kv_types.shape[0], mask.q_len))
        rule = TokenTypes(q_types, kv_types, zero_policy)
        ids: dict[str, Any] = {}
        if combine != "union" if update_segment_ids is None else update_segment_ids:
            kept = mask._valid() if combine == "intersect" else (True, True)
            padding = -1 if zero_policy != "none" else 0
            ids = {
                name: jnp.where(valid, jnp.where(types == 0, padding, types), -1)
                for name, valid, types in zip(
                    ("q_ids", "kv_ids"), kept, (q_types, kv_types), strict=True
                )
            }
        if combine == "intersect":
            return mask._restricted(rule, **ids)
        if combine == "replace" and ids:
            # The types alone say what is padding; positions stay what they were.
            q_positions, kv_positions = mask._positions()
            return mask._changed(
                rule=rule, ids_rule=None, q_positions=q_positions, kv_positions=kv_positions, **ids
            )
        # What the ids say is no longer a part of the rule: keep it beside the rule.
        ids_rule = mask_ids.id_rules(mask._ids_source)
        joined = mask.rule | rule if combine == "union" else rule
        return mask._changed(rule=joined, ids_rule=ids_rule, **ids)

    def apply_kv_lengths(
        self,
        kv_lengths: Any,
        *,
        q_len: int | None = None,
        end_index: Any = None,
        sliding_window: int | None = None,
    ) -> Self:
        """Hide the keys past each row's length; keep a range of queries and the newest keys.

        Args:
            kv_lengths: number of keys that exist, an integer or one per batch row `(B,)`.
            q_len: keep this many queries, those before `end_index`.
            end_index: one past the last query to keep, an integer or one per batch row.
            sliding_window: keep this many keys, the last ones that exist.

        Returns:
            The mask; keys past the length are reported as padding.

        Raises:
            ValueError: if one of `q_len` and `end_index` comes without the other, or a size does
                not fit.

        >>> from ejkernel.types import MaskInfo
        >>> mask = MaskInfo.from_segments(jnp.zeros((1, 4), int)).apply_causal()
        >>> step = mask.apply_kv_lengths(jnp.array([3]), q_len=1, end_index=3)
        >>> step.attention_mask[0, 0].astype(int).tolist()
        [[1, 1, 1, 0]]
        """
        name = "apply_kv_lengths"
        where = f"MaskInfo.{name}"
        if (q_len is None) != (end_index is None):
            raise ValueError(f"{where}: q_len and end_index go together.")
        mask, lengths = self._with_numbers(f"{name}: kv_lengths", kv_lengths)
        mask = mask._restricted(KeyLength(lengths))
        if mask.kv_positions is not None:
            positions = mask_ids.cut_off(mask.kv_positions, lengths, KEY_PADDING_POSITION)
            mask = mask._changed(kv_positions=positions)
        if q_len is not None:
            size = static_integer(f"{where}: q_len", q_len, 1)
            if size > mask.q_len:
                raise ValueError(f"{where}: q_len must be at most {mask.q_len}, got {size}.")
            mask, end = mask._with_numbers(f"{name}: end_index", end_index)
            start = _clip(end - size, 0, mask.q_len - size)
            mask = mask._sliced(start, size, 0, mask.kv_len)
        if sliding_window is not None:
            width = min(static_integer(f"{where}: sliding_window", sliding_window, 1), mask.kv_len)
            start = _clip(lengths - width, 0, mask.kv_len - width)
            mask = mask._sliced(0, mask.q_len, start, width)
        return mask

    def materialize_attention_mask(self, dtype: DTypeLike = jnp.bool_) -> Self:
        """The same mask with `attention_mask` computed, in `dtype`.

        >>> from ejkernel.types import MaskInfo
        >>> mask = MaskInfo.from_segments(jnp.zeros((1, 4), int))
        >>> mask.materialize_attention_mask(jnp.float16).attention_mask.dtype
        dtype('float16')
        """
        mask = self.to_dtype(dtype)
        mask.get_or_compute_attention_mask(dtype)
        return mask

    def materialize_segment_ids(self, per_head: bool = False) -> Self:
        """The same mask with its segment ids computed and stored.

        Args:
            per_head: whether each head should have ids of its own, which a mask cannot store.

        Returns:
            The mask.

        Raises:
            ValueError: if `per_head` is set and the mask differs between heads.
        """
        if per_head and self.rule.heads > 1:
            raise ValueError(
                "MaskInfo.materialize_segment_ids: a mask stores one id per token; "
                "get_or_compute_segment_ids(per_head=True) gives ids for each head."
            )
        q_ids, kv_ids = self._ids()
        return self._changed(q_ids=q_ids, kv_ids=kv_ids)

    def to_dtype(self, dtype: DTypeLike) -> Self:
        """The same mask, its `attention_mask` in `dtype`, 1 where allowed.

        >>> from ejkernel.types import MaskInfo
        >>> MaskInfo.from_segments(jnp.zeros((1, 4), int)).to_dtype("int8").attention_mask.dtype
        dtype('int8')
        """
        return self._changed(mask_dtype=np.dtype(dtype))

    def _types(self, where: str, types: Any, length: int) -> tuple[jax.Array, Self]:
        """Token types of one side, with the batch of the mask, and the mask with that of them."""
        batch = self.batch_size
        types = integers(f"{where}: token_type_ids", types, 1 if batch is None else 2)
        if types.shape[-1] != length:
            raise ValueError(
                f"{where}: token types must have the mask's length {length}, got {types.shape}."
            )
        if batch is None or types.shape[0] == batch:
            return types, self
        if batch != 1 and types.shape[0] != 1:
            raise ValueError(
                f"{where}: token types must have the mask's batch {batch}, got {types.shape}."
            )
        size = max(batch, types.shape[0])
        return jnp.broadcast_to(types, (size, length)), self._with_batch(size)


def _clip(number: Any, low: int, high: int) -> Any:
    return max(low, min(number, high)) if isinstance(number, int) else jnp.clip(number, low, high)


def _chunk_numbers(valid: jax.Array, size: Any) -> jax.Array:
    if not isinstance(size, int):
        size = size[..., None]
    return jnp.where(valid, jnp.arange(valid.shape[-1]) // size + 1, -1).astype(jnp.int32)
