"""The ways to make a mask from what a model has at hand."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel.types.arguments import choice, host_values, integers, static_integer
from ejkernel.types.conversion import cu_seqlens_to_mask
from ejkernel.types.mask_base import Self
from ejkernel.types.mask_transformations import MaskTransformations
from ejkernel.types.rules import Band, Chunks, Dense, Everything, Segments
from ejkernel.types.sharding import AxisName


class MaskConstructors(MaskTransformations):
    """Everything that makes a mask from something else."""

    @classmethod
    def from_segments(
        cls,
        q_segment_ids: Any,
        kv_segment_ids: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        *,
        is_attn_mask: bool = False,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
    ) -> Self:
        """Tokens of one segment see each other.

        `mask[q, k] = (q_segment_ids[q] == kv_segment_ids[k]) and both are at least 0`.

        Args:
            q_segment_ids: ids `(B, Q)`; any negative id is padding.
            kv_segment_ids: ids `(B, K)`; by default the keys are the queries.
            q_positions: positions of the queries `(B, Q)`, where they are not to be counted.
            kv_positions: positions of the keys `(B, K)`.
            is_attn_mask: the arrays are masks of tokens instead of ids: not 0 is a token.
            batch_axis_name: mesh axes of the batch.
            qheads_axis_name: mesh axes of the query heads.
            kvheads_axis_name: mesh axes of the key heads.
            sequence_axis_name: mesh axes of the sequence.

        Returns:
            The mask.

        Raises:
            ValueError: if an array is not of integers `(B, length)`, or their batches differ.

        >>> from ejkernel.types import MaskInfo
        >>> mask = MaskInfo.from_segments(jnp.array([[0, 0, 1, -1]]))
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
        """
        where = "MaskInfo.from_segments"
        read = _ids_of_token_mask if is_attn_mask else integers
        q_ids = read(f"{where}: q_segment_ids", q_segment_ids, 2)
        kv_ids = q_ids
        if kv_segment_ids is not None:
            kv_ids = read(f"{where}: kv_segment_ids", kv_segment_ids, 2)
        if 1 not in (q_ids.shape[0], kv_ids.shape[0]) and q_ids.shape[0] != kv_ids.shape[0]:
            raise ValueError(
                f"{where}: q_segment_ids and kv_segment_ids must have the same batch, "
                f"got {q_ids.shape} and {kv_ids.shape}."
            )
        return cls(
            Segments(q_ids, kv_ids).with_batch(max(q_ids.shape[0], kv_ids.shape[0])),
            q_ids.shape[1],
            kv_ids.shape[1],
            batch_axis_name=batch_axis_name,
            qheads_axis_name=qheads_axis_name,
            kvheads_axis_name=kvheads_axis_name,
            sequence_axis_name=sequence_axis_name,
        )._with_positions(where, q_positions, kv_positions)

    @classmethod
    def from_attention_mask(
        cls,
        attention_mask: Any,
        q_positions: Any = None,
        kv_positions: Any = None,
        *,
        mask_is_valid: bool = True,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
    ) -> Self:
        """A mask of tokens or of pairs, as given.

        Args:
            attention_mask: `(B, S)` a mask of tokens, `(B, Q, K)` or `(B, H, Q, K)` a mask of
                pairs; what is not 0 is allowed.
            q_positions: positions of the queries `(B, Q)`.
            kv_positions: positions of the keys `(B, K)`.
            mask_is_valid: False for a mask that is set where attention is forbidden.
            batch_axis_name: mesh axes of the batch.
            qheads_axis_name: mesh axes of the query heads.
            kvheads_axis_name: mesh axes of the key heads.
            sequence_axis_name: mesh axes of the sequence.

        Returns:
            The mask.

        Raises:
            ValueError: if the mask has another rank.

        >>> from ejkernel.types import MaskInfo
        >>> MaskInfo.from_attention_mask(jnp.array([[1, 1, 0]])).q_segment_ids.tolist()
        [[0, 0, -1]]
        """
        where = "MaskInfo.from_attention_mask"
        mask = jnp.asarray(attention_mask) != 0
        mask = mask if mask_is_valid else ~mask
        if mask.ndim == 2:
            ids = jnp.where(mask, 0, -1).astype(jnp.int32)
            rule = Segments(ids, ids)
        elif mask.ndim in (3, 4):
            rule = Dense(mask[:, None] if mask.ndim == 3 else mask)
        else:
            raise ValueError(
                f"{where}: the mask must be (B, S), (B, Q, K) or (B, H, Q, K), got {mask.shape}."
            )
        return cls(
            rule,
            mask.shape[-1] if mask.ndim == 2 else mask.shape[-2],
            mask.shape[-1],
            batch_axis_name=batch_axis_name,
            qheads_axis_name=qheads_axis_name,
            kvheads_axis_name=kvheads_axis_name,
            sequence_axis_name=sequence_axis_name,
        )._with_positions(where, q_positions, kv_positions)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: Any,
        *,
        max_q_len: int,
        cu_seqlens_kv: Any = None,
        max_kv_len: int | None = None,
        format: Literal["pairs", "packed"] = "pairs",  # noqa: A002
        q_positions: Any = None,
        kv_positions: Any = None,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
    ) -> Self:
        """Sequences of different lengths, each in a row of its own or all packed in one row.

        Args:
            cu_seqlens_q: for `"pairs"` `[start_0, end_0, start_1, end_1, ...]`, the tokens of each
                row of a padded batch; for `"packed"` `[0, length_0, length_0 + length_1, ...]`, the
                bounds of the sequences that share one row.
            max_q_len: number of queries in a row.
            cu_seqlens_kv: the same for the keys; by default that of the queries.
            max_kv_len: number of keys in a row; by default `max_q_len`.
            format: `"pairs"` or `"packed"`.
            q_positions: positions of the queries `(B, Q)`.
            kv_positions: positions of the keys `(B, K)`.
            batch_axis_name: mesh axes of the batch.
            qheads_axis_name: mesh axes of the query heads.
            kvheads_axis_name: mesh axes of the key heads.
            sequence_axis_name: mesh axes of the sequence.

        Returns:
            The mask, with a batch row per pair, or one row of segments 0, 1, 2, ...

        Raises:
            ValueError: if the arrays do not fit the format, or, where the values are at hand,
                decrease or run past the row.

        >>> from ejkernel.types import MaskInfo
        >>> MaskInfo.from_cu_seqlens(jnp.array([0, 3, 0, 5]), max_q_len=5).q_lens.tolist()
        [3, 5]
        >>> bounds = jnp.array([0, 2, 3])
        >>> MaskInfo.from_cu_seqlens(bounds, max_q_len=4, format="packed").q_segment_ids.tolist()
        [[0, 0, 1, -1]]
        """
        where = "MaskInfo.from_cu_seqlens"
        choice(f"{where}: format", format, ("pairs", "packed"))
        q_len = static_integer(f"{where}: max_q_len", max_q_len, 1)
        kv_len = q_len
        if max_kv_len is not None:
            kv_len = static_integer(f"{where}: max_kv_len", max_kv_len, 1)
        if cu_seqlens_kv is None:
            cu_seqlens_kv = cu_seqlens_q
        ids_of = _ids_of_pairs if format == "pairs" else _ids_of_packed
        q_ids = ids_of(f"{where}: cu_seqlens_q", cu_seqlens_q, q_len)
        kv_ids = ids_of(f"{where}: cu_seqlens_kv", cu_seqlens_kv, kv_len)
        if len(cu_seqlens_q) != len(cu_seqlens_kv):
            raise ValueError(
                f"{where}: cu_seqlens_q and cu_seqlens_kv must have the same length, "
                f"got {len(cu_seqlens_q)} and {len(cu_seqlens_kv)}."
            )
        return cls(
            Segments(q_ids, kv_ids),
            q_len,
            kv_len,
            batch_axis_name=batch_axis_name,
            qheads_axis_name=qheads_axis_name,
            kvheads_axis_name=kvheads_axis_name,
            sequence_axis_name=sequence_axis_name,
        )._with_positions(where, q_positions, kv_positions)

    @classmethod
    def from_random(
        cls,
        batch_size: int,
        q_len: int,
        kv_len: int | None = None,
        sparsity: float = 0.5,
        seed: int = 0,
        q_positions: Any = None,
        kv_positions: Any = None,
        *,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
    ) -> Self:
        """A random mask of pairs, for tests.

        Args:
            batch_size: number of batch rows.
            q_len: number of queries.
            kv_len: number of keys; by default `q_len`.
            sparsity: probability that a pair is forbidden.
            seed: of the random numbers.
            q_positions: positions of the queries `(B, Q)`.
            kv_positions: positions of the keys `(B, K)`.
            batch_axis_name: mesh axes of the batch.
            qheads_axis_name: mesh axes of the query heads.
            kvheads_axis_name: mesh axes of the key heads.
            sequence_axis_name: mesh axes of the sequence.

        Returns:
            The mask, the same for all heads.

        Raises:
            ValueError: if `sparsity` is not within 0 and 1.

        >>> from ejkernel.types import MaskInfo
        >>> MaskInfo.from_random(2, 8, kv_len=16, sparsity=0.25).shape
        (2, 8, 16)
        """
        where = "MaskInfo.from_random"
        if not 0 <= sparsity <= 1:
            raise ValueError(f"{where}: sparsity must be within 0 and 1, got {sparsity}.")
        shape = (batch_size, 1, q_len, q_len if kv_len is None else kv_len)
        mask = jax.random.bernoulli(jax.random.key(seed), 1 - sparsity, shape)
        return cls.from_attention_mask(
            mask,
            q_positions,
            kv_positions,
            batch_axis_name=batch_axis_name,
            qheads_axis_name=qheads_axis_name,
            kvheads_axis_name=kvheads_axis_name,
            sequence_axis_name=sequence_axis_name,
        )

    @classmethod
    def dynamic_init(
        cls,
        *,
        mask_info: Self | None = None,
        input_ids: Any = None,
        inputs_embeds: Any = None,
        attention_mask: Any = None,
    ) -> Self:
        """The mask of a model's inputs, whichever of them there are.

        Args:
            mask_info: returned as it is.
            input_ids: `(B, S)`; all are tokens.
            inputs_embeds: `(B, S, D)`; all are tokens.
            attention_mask: as for `from_attention_mask`.

        Returns:
            The mask of the first that is given of `mask_info`, `attention_mask`, `input_ids`,
            `inputs_embeds`.

        Raises:
            ValueError: if nothing is given, or an input has another rank.

        >>> from ejkernel.types import MaskInfo
        >>> MaskInfo.dynamic_init(input_ids=jnp.zeros((2, 4), int)).shape
        (2, 4, 4)
        """
        where = "MaskInfo.dynamic_init"
        if mask_info is not None:
            return mask_info
        if attention_mask is not None:
            return cls.from_attention_mask(attention_mask)
        for name, array, rank in (("input_ids", input_ids, 2), ("inputs_embeds", inputs_embeds, 3)):
            if array is None:
                continue
            if np.ndim(array) != rank:
                raise ValueError(f"{where}: {name} must have rank {rank}, got {np.shape(array)}.")
            # No pair is forbidden: the ids are only there to be reported.
            ids = jnp.zeros(np.shape(array)[:2], jnp.int32)
            return cls(Everything(), ids.shape[1], ids.shape[1], ids_rule=Segments(ids, ids))
        raise ValueError(
            f"{where}: give mask_info, attention_mask, input_ids or inputs_embeds; got none."
        )

    @staticmethod
    def create_chunked_attention_mask(
        chunk_size: int,
        q_len: int,
        kv_len: int | None = None,
        offset: int = 0,
        dtype: DTypeLike = jnp.bool_,
    ) -> jax.Array:
        """The mask `(Q, K)` of causal attention inside chunks.

        Args:
            chunk_size: number of tokens in a chunk.
            q_len: number of queries.
            kv_len: number of keys; by default `q_len`.
            offset: how far beyond itself a query sees.
            dtype: dtype of the result, 1 where allowed.

        Returns:
            `q // chunk_size == k // chunk_size and k <= q + offset`.

        Raises:
            ValueError: if `chunk_size` is not positive.

        >>> from ejkernel.types import MaskInfo
        >>> MaskInfo.create_chunked_attention_mask(2, 3, dtype=int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        """
        where = "MaskInfo.create_chunked_attention_mask: chunk_size"
        rule = Chunks(static_integer(where, chunk_size, 1)) & Band(None, offset)
        return rule.dense(q_len, q_len if kv_len is None else kv_len)[0].astype(dtype)

    def _with_positions(self, where: str, q_positions: Any, kv_positions: Any) -> Self:
        changes: dict[str, Any] = {}
        for name, positions, length in (
            ("q_positions", q_positions, self.q_len),
            ("kv_positions", kv_positions, self.kv_len),
        ):
            if positions is None:
                continue
            positions = integers(f"{where}: {name}", positions, 2)
            if positions.shape[1] != length or positions.shape[0] not in (1, self.batch_size):
                raise ValueError(
                    f"{where}: {name} must have shape {(self.batch_size, length)}, "
                    f"got {positions.shape}."
                )
            changes[name] = jnp.broadcast_to(positions, (self.batch_size, length))
        return self._changed(**changes) if changes else self


def _ids_of_token_mask(where: str, mask: Any, rank: int) -> jax.Array:
    """Ids 0 for tokens, -1 for padding."""
    return integers(where, jnp.where(jnp.asarray(mask) != 0, 0, -1), rank)


def _ids_of_pairs(where: str, pairs: Any, length: int) -> jax.Array:
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


def _ids_of_packed(where: str, cumulative: Any, length: int) -> jax.Array:
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
