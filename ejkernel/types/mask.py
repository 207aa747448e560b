"""`MaskInfo`, one object for a mask in all its representations, and the plain conversions."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from ejkernel.types import debug, sharding
from ejkernel.types import mask_construction as construction
from ejkernel.types import mask_fields as fields
from ejkernel.types import mask_ids as ids
from ejkernel.types import mask_statistics as statistics
from ejkernel.types import mask_transformation as transformation
from ejkernel.types.arguments import ArrayValues, SlidingWindow, flag, known_dtype
from ejkernel.types.block_map import BlockMap
from ejkernel.types.conversion import (
    attention_mask_to_qkv_cu_seqlens as attention_mask_to_qkv_cu_seqlens,
)
from ejkernel.types.conversion import cu_seqlens_to_mask as cu_seqlens_to_mask
from ejkernel.types.conversion import mask_to_segment_ids as mask_to_segment_ids
from ejkernel.types.conversion import (
    qkv_cu_seqlens_to_attention_mask as qkv_cu_seqlens_to_attention_mask,
)
from ejkernel.types.conversion import qkv_cu_seqlens_to_qkv_masks as qkv_cu_seqlens_to_qkv_masks
from ejkernel.types.conversion import qkv_masks_to_cu_seqlens as qkv_masks_to_cu_seqlens
from ejkernel.types.conversion import segment_ids_to_mask as segment_ids_to_mask
from ejkernel.types.conversion import segment_ids_to_qkv_masks as segment_ids_to_qkv_masks
from ejkernel.types.mask_transformation import KEEP, Keep, Replacement
from ejkernel.types.render import render_text
from ejkernel.types.rules import Rule, ZeroPolicy
from ejkernel.types.sharding import AxisName, MaskAxes
from ejkernel.types.sharding import MaskSharding as MaskSharding
from ejkernel.types.svg import render_html, render_svg

_BOOL = np.dtype(bool)


@debug.watch
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaskInfo:
    """Which keys each query may see, from segments, masks or lengths, through transformations.

    A mask is held as rules; nothing of size Q x K exists until `attention_mask` or `bias` is read.
    It is immutable and a pytree whose arrays all begin with the batch axis, so that it passes
    through `jit`, `vmap`, `grad` and `shard_map`. Reading it never changes what it means.

    >>> import jax.numpy as jnp
    >>> mask = MaskInfo.from_segments(jnp.array([[1, 1, 2, 2, -1]])).apply_causal()
    >>> mask.shape
    (1, 5, 5)
    >>> mask.attention_mask[0, 0].astype(int).tolist()
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    """

    rule: Rule  # which pairs are allowed; this alone decides, the rest is about tokens
    q_len: int
    kv_len: int
    # Positions that were given, or can no longer be counted.
    q_positions: Int[Array, "#b t"] | Int[Array, "t"] | None = None
    kv_positions: Int[Array, "#b s"] | Int[Array, "s"] | None = None
    ids_rule: Rule | None = None  # what segment ids are read from, where that is not `rule`
    # Segment ids to report instead of those of the rule.
    q_ids: Int[Array, "#b t"] | Int[Array, "t"] | None = None
    kv_ids: Int[Array, "#b s"] | Int[Array, "s"] | None = None
    mask_dtype: np.dtype = _BOOL  # of `attention_mask`
    batch_axis_name: AxisName = ("dp", "fsdp")  # mesh axes
    qheads_axis_name: AxisName = "tp"
    kvheads_axis_name: AxisName = "tp"
    sequence_axis_name: AxisName = "sp"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        fields.register(cls)

    @classmethod
    def from_segments(
        cls,
        q_segment_ids: ArrayValues,
        kv_segment_ids: ArrayValues | None = None,
        q_positions: ArrayValues | None = None,
        kv_positions: ArrayValues | None = None,
        *,
        is_attn_mask: bool = False,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
    ) -> "MaskInfo":
        """Tokens of one segment see each other.

        `mask[q, k] = (q_segment_ids[q] == kv_segment_ids[k]) and both are at least 0`.

        Args:
            q_segment_ids: ids `(B, Q)`; any negative id is padding.
            kv_segment_ids: ids `(B, K)`; by default the keys are the queries.
            q_positions, kv_positions: positions `(B, Q)`, `(B, K)`, if they are not to be counted.
            is_attn_mask: the arrays are masks of tokens instead of ids, boolean or integers: what
                is not 0 is a token.
            batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name: mesh axes.

        Raises:
            ValueError: if an array is not of integers `(B, length)`, or their batches differ.

        >>> mask = MaskInfo.from_segments(jnp.array([[0, 0, 1, -1]]))
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
        """
        axes = MaskAxes(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name)
        return construction.from_segments(
            cls, q_segment_ids, kv_segment_ids, q_positions, kv_positions, is_attn_mask, axes
        )

    @classmethod
    def from_attention_mask(
        cls,
        attention_mask: ArrayValues,
        q_positions: ArrayValues | None = None,
        kv_positions: ArrayValues | None = None,
        *,
        mask_is_valid: bool = True,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
    ) -> "MaskInfo":
        """A mask of tokens or of pairs, as given.

        Args:
            attention_mask: `(B, S)` a mask of tokens, `(B, Q, K)` or `(B, H, Q, K)` a mask of
                pairs, boolean or integers; what is not 0 is allowed.
            q_positions, kv_positions: positions `(B, Q)`, `(B, K)`, if they are not to be counted.
            mask_is_valid: False for a mask that is set where attention is forbidden.
            batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name: mesh axes.

        Raises:
            ValueError: if the mask has another rank or holds floats.

        >>> MaskInfo.from_attention_mask(jnp.array([[1, 1, 0]])).q_segment_ids.tolist()
        [[0, 0, -1]]
        """
        axes = MaskAxes(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name)
        return construction.from_attention_mask(
            cls, attention_mask, q_positions, kv_positions, mask_is_valid, axes
        )

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: ArrayValues,
        *,
        max_q_len: int,
        cu_seqlens_kv: ArrayValues | None = None,
        max_kv_len: int | None = None,
        format: Literal["pairs", "packed"] = "pairs",  # noqa: A002
        q_positions: ArrayValues | None = None,
        kv_positions: ArrayValues | None = None,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
    ) -> "MaskInfo":
        """Sequences of different lengths: a batch row for each pair, or one row of segments.

        Args:
            cu_seqlens_q: for `"pairs"` `[start_0, end_0, start_1, end_1, ...]`, the tokens of each
                row of a padded batch; for `"packed"` `[0, length_0, length_0 + length_1, ...]`, the
                bounds of the sequences that share one row.
            max_q_len: number of queries in a row.
            cu_seqlens_kv: the same for the keys; by default that of the queries.
            max_kv_len: number of keys in a row; by default `max_q_len`.
            format: `"pairs"` or `"packed"`.
            q_positions, kv_positions: positions `(B, Q)`, `(B, K)`, if they are not to be counted.
            batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name: mesh axes.

        Raises:
            ValueError: if the arrays do not fit the format, or, where the values are at hand,
                decrease or run past the row.

        >>> MaskInfo.from_cu_seqlens(jnp.array([0, 3, 0, 5]), max_q_len=5).q_lens.tolist()
        [3, 5]
        >>> bounds = jnp.array([0, 2, 3])
        >>> MaskInfo.from_cu_seqlens(bounds, max_q_len=4, format="packed").q_segment_ids.tolist()
        [[0, 0, 1, -1]]
        """
        axes = MaskAxes(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name)
        return construction.from_cu_seqlens(
            cls,
            (cu_seqlens_q, cu_seqlens_kv),
            (max_q_len, max_kv_len),
            format,
            (q_positions, kv_positions),
            axes,
        )

    @classmethod
    def from_random(
        cls,
        batch_size: int,
        q_len: int,
        kv_len: int | None = None,
        sparsity: float = 0.5,
        seed: int = 0,
        q_positions: ArrayValues | None = None,
        kv_positions: ArrayValues | None = None,
        *,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
    ) -> "MaskInfo":
        """A random mask of pairs, the same for all heads, for tests.

        Args:
            batch_size: number of batch rows.
            q_len: number of queries.
            kv_len: number of keys; by default `q_len`.
            sparsity: probability that a pair is forbidden.
            seed: of the random numbers.
            q_positions, kv_positions: positions `(B, Q)`, `(B, K)`, if they are not to be counted.
            batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name: mesh axes.

        Raises:
            ValueError: if `sparsity` is not within 0 and 1.

        >>> MaskInfo.from_random(2, 8, kv_len=16, sparsity=0.25).shape
        (2, 8, 16)
        """
        axes = MaskAxes(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name)
        shape = (batch_size, 1, q_len, q_len if kv_len is None else kv_len)
        mask = construction.random_mask(shape, sparsity, seed)
        return construction.from_attention_mask(cls, mask, q_positions, kv_positions, True, axes)

    @classmethod
    def dynamic_init(
        cls,
        *,
        mask_info: "MaskInfo | None" = None,
        input_ids: ArrayValues | None = None,
        inputs_embeds: ArrayValues | None = None,
        attention_mask: ArrayValues | None = None,
    ) -> "MaskInfo":
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

        >>> MaskInfo.dynamic_init(input_ids=jnp.zeros((2, 4), int)).shape
        (2, 4, 4)
        """
        if mask_info is not None:
            if not isinstance(mask_info, MaskInfo):
                kind = type(mask_info).__name__
                raise ValueError(f"MaskInfo.dynamic_init: mask_info must be a mask, got {kind}.")
            return mask_info
        if attention_mask is not None:
            return cls.from_attention_mask(attention_mask)
        return construction.dynamic_init(cls, input_ids, inputs_embeds)

    @staticmethod
    def create_chunked_attention_mask(
        chunk_size: int,
        q_len: int,
        kv_len: int | None = None,
        offset: int = 0,
        dtype: DTypeLike = jnp.bool_,
    ) -> jax.Array:
        """The mask `(Q, K)` of causal attention inside chunks.

        `q // chunk_size == k // chunk_size and k <= q + offset`.

        Args:
            chunk_size: number of tokens in a chunk.
            q_len: number of queries.
            kv_len: number of keys; by default `q_len`.
            offset: how far beyond itself a query sees.
            dtype: dtype of the result, 1 where allowed.

        Raises:
            ValueError: if `chunk_size` is not positive.

        >>> MaskInfo.create_chunked_attention_mask(2, 3, dtype=int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        """
        return construction.chunked_attention_mask(chunk_size, q_len, kv_len, offset, dtype)

    @property
    def batch_size(self) -> int | None:
        """Number of batch rows; None where `vmap` has taken the batch axis away."""
        return fields.batch_size(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(batch_size, q_len, kv_len)`, without the batch where there is none."""
        lengths = (self.q_len, self.kv_len)
        return lengths if self.batch_size is None else (self.batch_size, *lengths)

    @property
    def attention_mask(self) -> Shaped[Array, "*b n t s"]:
        """The mask of pairs `(B, 1 or H, Q, K)`, True where a query may see a key."""
        return statistics.attention_mask(self, self.mask_dtype)

    @property
    def bias(self) -> Float[Array, "*b n t s"]:
        """`create_bias()`: 0 where allowed, -inf elsewhere, float32."""
        return fields.cached(self, "bias", self.create_bias)

    @property
    def q_segment_ids(self) -> Int[Array, "*b t"]:
        """Segment ids of the queries `(B, Q)`, int32, negative for padding."""
        return ids.reported(self)[0]

    @property
    def kv_segment_ids(self) -> Int[Array, "*b s"]:
        """Segment ids of the keys `(B, K)`, int32, negative for padding."""
        return ids.reported(self)[1]

    @property
    def q_attention_mask(self) -> Int[Array, "*b t"]:
        """1 for each query that is a token, 0 for padding, `(B, Q)` int32."""
        return ids.valid(self)[0].astype(jnp.int32)

    @property
    def kv_attention_mask(self) -> Int[Array, "*b s"]:
        """1 for each key that is a token, 0 for padding, `(B, K)` int32."""
        return ids.valid(self)[1].astype(jnp.int32)

    @property
    def q_lens(self) -> Int[Array, "*b"]:
        """Number of query tokens of each batch row, `(B,)` int32."""
        return ids.valid(self)[0].sum(-1, dtype=jnp.int32)

    @property
    def kv_lens(self) -> Int[Array, "*b"]:
        """Number of key tokens of each batch row, `(B,)` int32."""
        return ids.valid(self)[1].sum(-1, dtype=jnp.int32)

    @property
    def q_position_ids(self) -> Int[Array, "*b t"]:
        """Position of each query in its segment, -1 for padding, `(B, Q)` int32."""
        return ids.positions(self)[0]

    @property
    def kv_position_ids(self) -> Int[Array, "*b s"]:
        """Position of each key in its segment, the largest int32 for padding, `(B, K)` int32."""
        return ids.positions(self)[1]

    @property
    def cu_seqlens_q(self) -> Int[Array, "pairs"]:
        """First query token of each row and one past its last, `(2 B,)` int32."""
        return self.get_or_compute_qkv_cu_seqlens()[0]

    @property
    def cu_seqlens_kv(self) -> Int[Array, "pairs"]:
        """First key token of each row and one past its last, `(2 B,)` int32."""
        return self.get_or_compute_qkv_cu_seqlens()[1]

    @property
    def is_multi_sequence(self) -> bool | jax.Array:
        """Whether some row holds more than one segment; a Python bool where it can be known."""
        return statistics.is_multi_sequence(self)

    def is_self_attention(self) -> bool | jax.Array:
        """Whether queries and keys are the same tokens; a Python bool where it can be known.

        They are if the lengths agree and, where there are segment ids, those agree too.
        """
        return statistics.is_self_attention(self)

    def get_or_compute_attention_mask(
        self, dtype: DTypeLike = jnp.bool_
    ) -> Shaped[Array, "*b n t s"]:
        """The mask of pairs `(B, 1 or H, Q, K)` in `dtype`, 1 where allowed."""
        return statistics.attention_mask(self, dtype)

    def get_or_compute_segment_ids(self, per_head: bool = False) -> tuple[jax.Array, jax.Array]:
        """Segment ids of queries and keys.

        Args:
            per_head: give each head of a dense mask ids of its own.

        Returns:
            `(B, Q)` and `(B, K)`, int32; with `per_head` `(B, H, Q)` and `(B, H, K)`.

        >>> mask = MaskInfo.from_attention_mask(jnp.array([[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]))
        >>> [ids.tolist() for ids in mask.get_or_compute_segment_ids()]
        [[[0, 0, 1]], [[0, 0, 1]]]
        """
        return ids.reported_per_head(self) if per_head else ids.reported(self)

    def get_or_compute_positions(self) -> tuple[jax.Array, jax.Array]:
        """Positions of queries `(B, Q)` and keys `(B, K)`, as given or counted in each segment.

        Padding has position -1 as a query and the largest int32 as a key, so that no causal
        comparison of positions lets it be seen.
        """
        return ids.positions(self)

    def get_or_compute_qkv_cu_seqlens(
        self, *, out_dtype: DTypeLike = jnp.int32, max_segments: int = 128
    ) -> tuple[jax.Array, jax.Array]:
        """Start and end of the tokens of each row, `(2 B,)` for queries and for keys.

        Args:
            out_dtype: dtype of the result.
            max_segments: a bound on the number of segments, for callers that have one. Pairs have
                one entry per row however many segments it holds, so the result is the same.

        Returns:
            The inverse of `from_cu_seqlens`: `[start_0, end_0, start_1, end_1, ...]`.
        """
        return statistics.cu_seqlens(self, out_dtype, max_segments)

    def get_qkv_masks(self, dtype: DTypeLike = jnp.bool_) -> tuple[jax.Array, ...]:
        """The masks of queries `(B, Q)`, of keys `(B, K)` and of pairs `(B, 1 or H, Q, K)`."""
        q_valid, kv_valid = ids.valid(self)
        mask = statistics.attention_mask(self, dtype)
        return q_valid.astype(dtype), kv_valid.astype(dtype), mask

    def create_bias(
        self, dtype: DTypeLike = jnp.float32, masked_value: ArrayLike = -np.inf
    ) -> Float[Array, "*b n t s"]:
        """A bias for attention logits `(B, 1 or H, Q, K)`: 0 where allowed, else `masked_value`.

        Args:
            dtype: a floating-point dtype.
            masked_value: what stands where a query may not see a key. A softmax over a row of
                nothing but -inf is NaN: guard such rows, or pass a finite value.

        Raises:
            ValueError: if the dtype is not a floating-point one.

        >>> MaskInfo.from_segments(jnp.array([[0, 1]])).create_bias("float16").tolist()
        [[[[0.0, -inf], [-inf, 0.0]]]]
        """
        return statistics.bias(self, dtype, masked_value)

    def segment_lens(self, max_segments: int) -> tuple[jax.Array, jax.Array]:
        """Number of tokens of each segment id, `(B, max_segments)` for queries and for keys, int32.

        Args:
            max_segments: ids 0 to `max_segments - 1` are counted.

        Raises:
            ValueError: if an id is not below `max_segments` and its value is at hand.

        >>> MaskInfo.from_segments(jnp.array([[0, 0, 2, -1]])).segment_lens(3)[0].tolist()
        [[2, 0, 1]]
        """
        return statistics.segment_lens(self, max_segments)

    def to_packed_cu_seqlens(self, max_segments: int) -> tuple[jax.Array, jax.Array]:
        """Cumulative lengths of all segments, as if the tokens of all rows stood in one row.

        Padding is left out, rows follow one another, and within a row segments are ordered by id
        (which must not decrease along the row). A segment that only queries or only keys have
        counts as empty for the others.

        Args:
            max_segments: the largest number of segments that the result can hold.

        Returns:
            `(max_segments + 1,)` for queries and for keys, int32, from 0; the total fills the rest.

        Raises:
            ValueError: if ids decrease or there are too many segments, and the values are at hand.

        >>> mask = MaskInfo.from_segments(jnp.array([[0, 0, 1, 1], [0, 0, 0, -1]]))
        >>> mask.to_packed_cu_seqlens(4)[0].tolist()
        [0, 2, 4, 7, 7]
        """
        return statistics.packed_cu_seqlens(self, max_segments)

    def block_map(self, block_q: int, block_k: int) -> BlockMap:
        """Which blocks of the mask are empty, partial or full, and lists of the others.

        It is found from the rules in O(blocks) work: the mask of pairs is not made.

        Args:
            block_q: queries in a block.
            block_k: keys in a block.

        Raises:
            ValueError: if a block size is not positive.

        >>> mask = MaskInfo.from_segments(jnp.array([[0, 0, 1, 1]])).apply_causal()
        >>> mask.block_map(2, 2).state[0, 0].tolist()
        [[1, 0], [0, 1]]
        """
        return statistics.blocks(self, block_q, block_k)

    def apply_causal(self, offset: ArrayValues = 0) -> "MaskInfo":
        """Let query q see keys up to `q + offset`: `k <= q + offset`, counted from the top left.

        Args:
            offset: an integer, or one per batch row `(B,)`; positive reveals later keys.

        Raises:
            ValueError: if `offset` is neither an integer nor one per batch row.

        >>> mask = MaskInfo.from_segments(jnp.zeros((1, 3), int)).apply_causal()
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        """
        return transformation.apply_causal(self, offset)

    def apply_sliding_window(
        self,
        sliding_window: SlidingWindow,
        *,
        offset: ArrayValues = 0,
        mode: Literal["default", "decode", "prefill"] | None = None,
        index: ArrayValues | None = None,
    ) -> "MaskInfo":
        """Let query q see `left` keys before `q + offset`, that key, and `right` keys after it.

        `q + offset - left <= k <= q + offset + right`. Where the mask is cut, so are its ids and
        positions.

        Args:
            sliding_window: a pair `(left, right)`, or one number for both sides; they may be
                traced, unless `mode` cuts the mask.
            offset: an integer, or one per batch row `(B,)`.
            mode: `"decode"` keeps query `index` and the `left + right + 1` keys around its window;
                `"prefill"` keeps all queries and the last `left + right + 1` keys, for a single
                number `w` the last `w`; `"default"`, like None, keeps everything.
            index: the query to keep, an integer or one per batch row; for `"decode"` only.

        Raises:
            ValueError: if the window is negative or no pair, the mode unknown, `index` missing or
                out of place, or the window traced where `mode` needs its size.

        >>> mask = MaskInfo.from_segments(jnp.zeros((1, 4), int)).apply_sliding_window((1, 0))
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
        """
        return transformation.apply_sliding_window(self, sliding_window, offset, mode, index)

    def apply_chunked(self, chunk_size: ArrayValues, offset: ArrayValues = 0) -> "MaskInfo":
        """Let each query see the keys of its own chunk up to itself.

        `q // chunk_size == k // chunk_size` and `k <= q + offset`. The mask reports chunk numbers,
        from 1, as its segment ids; segments still hold.

        Args:
            chunk_size: an integer, or one per batch row `(B,)`.
            offset: an integer, or one per batch row `(B,)`.

        Raises:
            ValueError: if `chunk_size` is not positive.

        >>> mask = MaskInfo.from_segments(jnp.zeros((1, 4), int)).apply_chunked(2)
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
        >>> mask.q_segment_ids.tolist()
        [[1, 1, 2, 2]]
        """
        return transformation.apply_chunked(self, chunk_size, offset)

    def apply_token_type_ids(
        self,
        token_type_ids: ArrayValues,
        *,
        combine: Literal["union", "intersect", "replace"] = "union",
        zero_policy: ZeroPolicy = "q",
        update_segment_ids: bool | None = None,
    ) -> "MaskInfo":
        """Let tokens of the same type see each other.

        Args:
            token_type_ids: types `(B, S)` of queries and keys alike, or a pair `((B, Q), (B, K))`.
            combine: `"union"` allows what the mask or the types allow, `"intersect"` what both
                allow, `"replace"` what the types allow.
            zero_policy: whose type 0 is padding: that of queries `"q"`, of keys `"kv"`, of
                `"both"`, or of `"none"`, where 0 is a type like any other.
            update_segment_ids: report the types as segment ids; by default unless a union, which
                ids cannot say.

        Raises:
            ValueError: if the shape, `combine` or `zero_policy` will not do.

        >>> mask = MaskInfo.from_segments(jnp.zeros((1, 3), int)).apply_causal()
        >>> mask = mask.apply_token_type_ids(jnp.array([[1, 1, 0]]), combine="union")
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
        """
        return transformation.apply_token_type_ids(
            self, token_type_ids, combine, zero_policy, update_segment_ids
        )

    def apply_kv_lengths(
        self,
        kv_lengths: ArrayValues,
        *,
        q_len: int | None = None,
        end_index: ArrayValues | None = None,
        sliding_window: int | None = None,
    ) -> "MaskInfo":
        """Hide the keys past each row's length; keep a range of queries and the newest keys.

        Args:
            kv_lengths: number of keys that exist, an integer or one per batch row `(B,)`; keys past
                it are reported as padding.
            q_len: keep this many queries, those before `end_index`.
            end_index: one past the last query to keep, an integer or one per batch row.
            sliding_window: keep this many keys, the last ones that exist.

        Raises:
            ValueError: if one of `q_len` and `end_index` comes without the other, or a size does
                not fit.

        >>> mask = MaskInfo.from_segments(jnp.zeros((1, 4), int)).apply_causal()
        >>> step = mask.apply_kv_lengths(jnp.array([3]), q_len=1, end_index=3)
        >>> step.attention_mask[0, 0].astype(int).tolist()
        [[1, 1, 1, 0]]
        """
        return transformation.apply_kv_lengths(self, kv_lengths, q_len, end_index, sliding_window)

    def materialize_attention_mask(self, dtype: DTypeLike = jnp.bool_) -> "MaskInfo":
        """The same mask with `attention_mask` computed, in `dtype`.

        >>> mask = MaskInfo.from_segments(jnp.zeros((1, 4), int))
        >>> mask.materialize_attention_mask(jnp.float16).attention_mask.dtype
        dtype('float16')
        """
        mask = self.to_dtype(dtype)
        mask.get_or_compute_attention_mask(dtype)
        return mask

    def materialize_segment_ids(self, per_head: bool = False) -> "MaskInfo":
        """The same mask with its segment ids computed and stored.

        Args:
            per_head: whether each head should have ids of its own, which a mask cannot store.

        Raises:
            ValueError: if `per_head` is set and the mask differs between heads.
        """
        return ids.materialized(self, flag("MaskInfo.materialize_segment_ids: per_head", per_head))

    def to_dtype(self, dtype: DTypeLike) -> "MaskInfo":
        """The same mask, its `attention_mask` in `dtype`, 1 where allowed.

        >>> MaskInfo.from_segments(jnp.zeros((1, 4), int)).to_dtype("int8").attention_mask.dtype
        dtype('int8')
        """
        return fields.changed(self, mask_dtype=known_dtype("MaskInfo: dtype", dtype))

    def replace(
        self,
        *,
        attention_mask: Replacement = KEEP,
        q_segment_ids: Replacement = KEEP,
        kv_segment_ids: Replacement = KEEP,
        cu_seqlens_q: Replacement = KEEP,
        cu_seqlens_kv: Replacement = KEEP,
        q_positions: Replacement = KEEP,
        kv_positions: Replacement = KEEP,
        batch_axis_name: AxisName | Keep = KEEP,
        qheads_axis_name: AxisName | Keep = KEEP,
        kvheads_axis_name: AxisName | Keep = KEEP,
        sequence_axis_name: AxisName | Keep = KEEP,
    ) -> "MaskInfo":
        """A mask with some of its parts replaced; what is not named stays.

        Args:
            attention_mask: a mask of pairs of this mask's lengths to take the place of all rules;
                None leaves only what the segment ids say.
            q_segment_ids: ids `(B, Q)` to take the place of those in the rules; None drops the
                segments of queries and keys.
            kv_segment_ids: ids `(B, K)`, likewise.
            cu_seqlens_q, cu_seqlens_kv: start and end pairs `(2 B,)`, another way to give the ids.
            q_positions, kv_positions: positions; None to count them in the segments.
            batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name: mesh axes.

        Raises:
            ValueError: if a shape does not fit, or both ids and lengths are given for one side.

        >>> mask = MaskInfo.from_segments(jnp.array([[0, 0, 0]])).apply_causal()
        >>> mask = mask.replace(q_segment_ids=jnp.array([[0, 0, -1]]))
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
        """
        names = {
            "batch_axis_name": batch_axis_name,
            "qheads_axis_name": qheads_axis_name,
            "kvheads_axis_name": kvheads_axis_name,
            "sequence_axis_name": sequence_axis_name,
        }
        return transformation.replaced(
            self,
            attention_mask,
            (q_segment_ids, kv_segment_ids),
            (cu_seqlens_q, cu_seqlens_kv),
            (q_positions, kv_positions),
            names,
        )

    def get_shardings(
        self, sequence_parallel: bool = False, *, mesh: Mesh | AbstractMesh
    ) -> MaskSharding:
        """How each representation of the mask lies on a mesh.

        Axis names that the mesh lacks are dropped, and so are axes that do not divide a dimension.

        Args:
            sequence_parallel: shard the sequence over `sequence_axis_name` too: queries of the mask
                of pairs, queries and keys of ids and positions.
            mesh: a `jax.sharding.Mesh`.

        Returns:
            A `NamedSharding` for the mask of pairs, for ids, and for positions that were given;
            None for the rest.

        >>> mask = MaskInfo.from_random(batch_size=2, q_len=8)
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("dp",))
        >>> tuple(mask.get_shardings(mesh=mesh).q_segment_ids.spec)
        ('dp', None)
        """
        return sharding.shardings(self, mesh, sequence_parallel)

    @staticmethod
    def get_empty_sharding() -> MaskSharding:
        """A `MaskSharding` of nothing.

        >>> MaskInfo.get_empty_sharding().attention_mask is None
        True
        """
        return MaskSharding()

    def visualize(
        self,
        block_size: int = 32,
        batch: int = 0,
        head: int = 0,
        fit_in_screen: bool = True,
        max_rows: int = 32,
        max_cols: int = 64,
        charset: Literal["unicode", "ascii"] = "unicode",
        show_segments: bool = True,
        return_str: bool = False,
    ) -> str | None:
        """Print the mask of one head of one batch row, block by block.

        A block is full if all its pairs are allowed, empty if none is, else partial.

        Args:
            block_size: queries and keys in a block.
            batch, head: the batch row and the head.
            fit_in_screen, max_rows, max_cols: draw larger blocks where there would be more than
                `max_rows` rows or `max_cols` columns of them.
            charset: `"unicode"` or `"ascii"`.
            show_segments: label rows and columns of blocks with their segment ids.
            return_str: return the text instead of printing it.

        Raises:
            IndexError: if the mask has no such batch row or head.
            ValueError: if the character set is unknown, or the mask is being traced.

        >>> mask = MaskInfo.from_segments(jnp.array([[0, 0, 1, 1]]))
        >>> mask.visualize(block_size=2, charset="ascii", show_segments=False)
        Attention mask (batch=0, head=0) block=(2x2) mask_shape=(1, 1, 4, 4)
          ====
        ||##  ||
        ||  ##||
          ====
        Legend mask: full='██'/##, partial='░░'/.., empty='  '
        """
        screen = (max_rows, max_cols) if fit_in_screen else None
        text = render_text(self, block_size, batch, head, screen, charset, show_segments)
        if return_str:
            return text
        print(text)
        return None

    def to_svg(self, batch: int = 0, head: int = 0, max_blocks: int = 64) -> str:
        """A picture of one head of one batch row, as an `<svg>` element.

        Args:
            batch, head: the batch row and the head.
            max_blocks: draw at most this many blocks along each side.

        Raises:
            IndexError: if the mask has no such batch row or head.
            ValueError: if the mask is being traced.

        >>> MaskInfo.from_random(batch_size=1, q_len=8).to_svg()[:4]
        '<svg'
        """
        return render_svg(self, batch, head, max_blocks)

    def _repr_html_(self) -> str:
        return render_html(self)

    def __repr__(self) -> str:
        batch = "" if self.batch_size is None else f"batch_size={self.batch_size}, "
        return f"MaskInfo({batch}q_len={self.q_len}, kv_len={self.kv_len}, rule={self.rule!r})"


fields.register(MaskInfo)
