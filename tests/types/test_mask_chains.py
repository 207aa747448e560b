"""Chains of transformations against a NumPy model that works on the whole mask."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from ejkernel.types import MaskInfo

BATCH, LENGTH = 2, 6
LARGEST = 2**31 - 1
EXAMPLES = examples(30)


@dataclasses.dataclass
class Model:
    """A mask as plain arrays: pairs [b, n, q, k], ids and positions [b, q], [b, k]."""

    mask: np.ndarray
    ids: list
    positions: list

    def forbid(self, pairs):
        self.mask = self.mask & pairs

    @property
    def q(self):
        return np.arange(self.mask.shape[-2])[:, None]

    @property
    def k(self):
        return np.arange(self.mask.shape[-1])[None, :]

    def cut(self, q_start, q_len, k_start, k_len):
        """Keep a rectangle of each batch row."""
        q_start, k_start = np.broadcast_to(q_start, BATCH), np.broadcast_to(k_start, BATCH)
        rows = lambda array, start, size: np.stack(
            [array[b, start[b] : start[b] + size] for b in range(BATCH)]
        )
        self.mask = np.stack(
            [
                self.mask[b][:, q_start[b] : q_start[b] + q_len, k_start[b] : k_start[b] + k_len]
                for b in range(BATCH)
            ]
        )
        for values in (self.ids, self.positions):
            values[0] = rows(values[0], q_start, q_len)
            values[1] = rows(values[1], k_start, k_len)


def per_row(number):
    return np.asarray(number).reshape(-1, 1, 1, 1)


def causal(model, offset):
    model.forbid(model.k <= model.q + per_row(offset))


def window(model, sides, mode, index):
    left, right = sides if isinstance(sides, tuple) else (sides, sides)
    model.forbid((model.k >= model.q - left) & (model.k <= model.q + right))
    q_len, kv_len = model.mask.shape[-2:]
    width = min(left + right + 1, kv_len)
    if mode == "decode":
        at = np.clip(index, 0, q_len - 1)
        model.cut(at, 1, np.clip(at - left, 0, kv_len - width), width)
    if mode == "prefill":
        width = width if isinstance(sides, tuple) else max(1, min(sides, kv_len))
        model.cut(0, q_len, kv_len - width, width)


def chunked(model, size):
    model.forbid((model.q // size == model.k // size) & (model.k <= model.q))
    for side in (0, 1):
        ids = model.ids[side]
        model.ids[side] = np.where(ids >= 0, np.arange(ids.shape[1]) // size + 1, -1)


def token_types(model, types, combine, zero_policy):
    q_types, kv_types = types[:, : model.mask.shape[-2]], types[:, -model.mask.shape[-1] :]
    a, b = q_types[:, None, :, None], kv_types[:, None, None, :]
    match = (a == b) & ((a != 0) | (zero_policy == "none"))
    if combine == "union":
        model.mask = model.mask | match
        return
    for side, own in enumerate((q_types, kv_types)):
        ids = np.where((own == 0) & (zero_policy != "none"), -1, own)
        if combine == "intersect":
            ids = np.where(model.ids[side] >= 0, ids, -1)
        model.ids[side] = ids
    if combine == "intersect":
        model.forbid(match)
    else:
        model.mask = np.broadcast_to(match, model.mask.shape)


def lengths(model, count, q_len, end, width):
    count = np.broadcast_to(count, BATCH)
    model.forbid(model.k < per_row(count))
    beyond = np.arange(model.mask.shape[-1]) >= count[:, None]
    model.ids[1] = np.where(beyond, -1, model.ids[1])
    model.positions[1] = np.where(beyond, LARGEST, model.positions[1])
    queries, keys = model.mask.shape[-2:]
    if q_len is not None:
        q_len = min(q_len, queries)
        model.cut(np.clip(np.asarray(end) - q_len, 0, queries - q_len), q_len, 0, keys)
    if width is not None:
        width = min(width, keys)
        model.cut(0, model.mask.shape[-2], np.clip(count - width, 0, keys - width), width)


def apply(mask, step):
    """The same step on a `MaskInfo`."""
    kind, *numbers = step
    array = lambda number: jnp.array(number) if isinstance(number, list) else number
    if kind is causal:
        return mask.apply_causal(array(numbers[0]))
    if kind is window:
        sides, mode, index = numbers
        index = array(index) if mode == "decode" else None
        return mask.apply_sliding_window(sides, mode=mode, index=index)
    if kind is chunked:
        return mask.apply_chunked(numbers[0])
    if kind is token_types:
        types, combine, policy = numbers
        types = jnp.array(types)
        pair = types[:, : mask.q_len], types[:, -mask.kv_len :]
        return mask.apply_token_type_ids(pair, combine=combine, zero_policy=policy)
    count, q_len, end, width = numbers
    return mask.apply_kv_lengths(
        array(count),
        q_len=None if q_len is None else min(q_len, mask.q_len),
        end_index=None if q_len is None else array(end),
        sliding_window=width,
    )


def numbers(low, high):
    integer = st.integers(low, high)
    return integer | st.lists(integer, min_size=BATCH, max_size=BATCH)


def table(low, high):
    """Random numbers: drawn one by one they would mostly be all the same."""
    draw = lambda seed: np.random.default_rng(seed).integers(low, high + 1, (BATCH, LENGTH))
    return st.integers(0, 10**6).map(draw)


STEPS = st.one_of(
    st.tuples(st.just(causal), numbers(-2, 3)),
    st.tuples(
        st.just(window),
        st.sampled_from([1, 3, (2, 0), (0, 2), (9, 9)]),
        st.sampled_from([None, "default", "decode", "prefill"]),
        numbers(-1, LENGTH),
    ),
    st.tuples(st.just(chunked), st.integers(1, 4)),
    st.tuples(
        st.just(token_types),
        table(0, 2),
        st.sampled_from(["union", "intersect", "replace"]),
        st.sampled_from(["q", "kv", "both", "none"]),
    ),
    st.tuples(
        st.just(lengths),
        numbers(-1, LENGTH + 1),
        st.none() | st.integers(1, 3),
        numbers(0, LENGTH),
        st.none() | st.integers(1, 4),
    ),
)


def positions_of(ids, padding):
    positions = np.full(ids.shape, padding)
    for b, row in enumerate(ids):
        for i, value in enumerate(row):
            if value >= 0:
                follows = i > 0 and row[i - 1] == value
                positions[b, i] = positions[b, i - 1] + 1 if follows else 0
    return positions


def segments_model(ids):
    a, b = ids[:, None, :, None], ids[:, None, None, :]
    positions = [positions_of(ids, -1), positions_of(ids, LARGEST)]
    return Model((a == b) & (a >= 0), [ids, ids], positions)


@EXAMPLES
@given(table(-1, 2), st.lists(STEPS, min_size=1, max_size=4))
def test_a_chain_from_segments_is_the_chain_on_the_whole_mask(ids, steps):
    mask, model = MaskInfo.from_segments(jnp.array(ids)), segments_model(ids)
    for step in steps:
        kind, *arguments = step
        mask = apply(mask, step)
        kind(model, *arguments)
    np.testing.assert_array_equal(mask.attention_mask, model.mask)
    np.testing.assert_array_equal(mask.q_segment_ids, model.ids[0])
    np.testing.assert_array_equal(mask.kv_segment_ids, model.ids[1])
    np.testing.assert_array_equal(mask.q_position_ids, model.positions[0])
    np.testing.assert_array_equal(mask.kv_position_ids, model.positions[1])
    np.testing.assert_array_equal(mask.q_lens, (model.ids[0] >= 0).sum(-1))
    assert mask.shape == (BATCH, *model.mask.shape[-2:])


@EXAMPLES
@given(
    st.lists(st.booleans(), min_size=23, max_size=23),
    st.sampled_from([1, 3]),
    st.lists(STEPS, min_size=2, max_size=3),
)
def test_a_chain_from_a_mask_of_pairs_is_the_chain_on_it(bits, heads, steps):
    given_mask = np.resize(np.array(bits), (BATCH, heads, LENGTH, LENGTH))
    mask = MaskInfo.from_attention_mask(jnp.array(given_mask))
    zeros = np.zeros((BATCH, LENGTH), int)
    model = Model(given_mask, [zeros, zeros], [zeros, zeros])
    for step in steps:
        kind, *arguments = step
        mask = apply(mask, step)
        kind(model, *arguments)
    np.testing.assert_array_equal(
        np.broadcast_to(mask.attention_mask, model.mask.shape), model.mask
    )


def read_everything(mask):
    for name in dir(type(mask)):
        if not name.startswith("_") and isinstance(getattr(type(mask), name), property):
            getattr(mask, name)
    mask.get_or_compute_segment_ids(per_head=True)
    mask.get_qkv_masks()
    mask.block_map(2, 2)
    repr(mask)


def observed(mask):
    return jax.tree.map(
        np.asarray,
        (
            mask.attention_mask,
            mask.get_or_compute_segment_ids(),
            mask.get_or_compute_positions(),
            mask.get_or_compute_qkv_cu_seqlens(),
            mask.block_map(2, 2),
            mask.rule,
        ),
    )


@examples(6)
@given(table(-1, 2), st.lists(STEPS, min_size=2, max_size=3))
def test_reading_a_mask_changes_nothing(ids, steps):
    untouched = read = MaskInfo.from_segments(jnp.array(ids))
    untouched = MaskInfo.from_segments(jnp.array(ids))
    for step in steps:
        read_everything(read)
        untouched, read = apply(untouched, step), apply(read, step)
    read_everything(read)
    jax.tree.map(np.testing.assert_array_equal, observed(read), observed(untouched))


@examples(10)
@given(table(-1, 2), st.lists(STEPS, min_size=2, max_size=3))
def test_a_jitted_chain_gives_the_same_mask(ids, steps):
    def chain(mask):
        for step in steps:
            mask = apply(mask, step)
        return mask

    mask = MaskInfo.from_segments(jnp.array(ids))
    eager, jitted = chain(mask), jax.jit(chain)(mask)
    jax.tree.map(np.testing.assert_array_equal, jitted.rule, eager.rule)
    np.testing.assert_array_equal(jitted.attention_mask, eager.attention_mask)
    np.testing.assert_array_equal(jitted.q_segment_ids, eager.q_segment_ids)
    np.testing.assert_array_equal(jitted.kv_position_ids, eager.kv_position_ids)


ROW_STEPS = STEPS.filter(lambda step: step[0] is not token_types).map(
    # One number for all rows: inside vmap there is only one row.
    lambda step: tuple(part[0] if isinstance(part, list) else part for part in step)
)


@examples(10)
@given(table(-1, 2), st.lists(ROW_STEPS, min_size=1, max_size=3))
def test_a_chain_inside_vmap_is_the_chain_of_each_row(ids, steps):
    def chain(mask):
        for step in steps:
            mask = apply(mask, step)
        return (
            mask.attention_mask,
            mask.q_segment_ids,
            mask.kv_position_ids,
            mask.q_lens,
            mask.cu_seqlens_kv,
        )

    mask = MaskInfo.from_segments(jnp.array(ids))
    mapped = jax.vmap(chain)(mask)
    looped = [chain(MaskInfo.from_segments(jnp.array(ids[b : b + 1]))) for b in range(BATCH)]
    for found, *expected in zip(mapped, *looped, strict=True):
        expected = np.stack([np.asarray(row).reshape(found.shape[1:]) for row in expected])
        np.testing.assert_array_equal(found, expected)
