"""Arguments of the Triton kernels: static arguments, mask operands, block lists.

The kernels evaluate a mask in three parts. A *conjunction* holds where `low[q] <= k <= high[q]` and
some ids of q equal those of k. Bands, chunks, lengths, segments and token types are of that form,
and so is every conjunction of them; a disjunction becomes several conjunctions. A *dense mask* has
an entry for each pair, or for each block of pairs. The *block map* says which tiles to visit.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.triton.bridge import matmul_precision, padded_size
from ejkernel.kernels.common.triton.device_types import StaticArguments
from ejkernel.kernels.flash_attention import dropout
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.flash_attention.static_arrays import static_constants
from ejkernel.types import kernel_mask
from ejkernel.types.block_map import EMPTY, FULL, block_map
from ejkernel.types.rule_arrays import LARGE, bounded
from ejkernel.types.rules import (
    And,
    Band,
    Blocks,
    Chunks,
    Dense,
    Everything,
    KeyLength,
    Match,
    QueryLength,
    Rule,
)

_MAX_CONJUNCTIONS = 6  # a mask of more becomes dense


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashStaticArguments(StaticArguments):
    """Compile-time constants of a launch."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    head_width: int  # head_dim, padded to a tile
    value_width: int
    block_q: int
    block_k: int
    q_blocks: int
    k_blocks: int
    ragged_queries: int  # 1 where q_len is no multiple of block_q
    ragged_keys: int
    precision: str
    scale: float
    plain: bool  # neither bias nor soft cap, and scale > 0: the logits are scaled products
    exp2_scale: float  # logits in base 2, divided by what `tile_logits` gives
    soft_cap: float
    sinks: bool
    dropout: bool
    dropout_shares: bool
    dropout_threshold: int
    dropout_scale: float  # of the weights that dropout keeps
    bias: bool
    bias_batch: int
    bias_heads: int
    bias_rows: int
    bias_width: int
    by_key_block: bool  # the block map has the query blocks of each key block
    block_lists: bool  # the visited blocks are a list, not a range
    block_map_batched: bool
    block_map_heads: bool
    has_partial_blocks: bool  # some blocks may need a mask
    conjunctions: int
    has_low: int
    has_high: int
    id_pairs: int  # of a conjunction
    q_mask_rows: int
    k_mask_rows: int
    mask_batched: bool
    dense_mask: bool
    dense_mask_blocks: bool  # it has an entry for each block of pairs
    dense_mask_batched: bool
    dense_mask_heads: int
    dense_mask_rows: int
    dense_mask_width: int

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads

    @property
    def q_stride(self) -> int:
        return self.heads * self.head_dim

    @property
    def o_stride(self) -> int:
        return self.heads * self.value_dim

    @property
    def k_stride(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def v_stride(self) -> int:
        return self.kv_heads * self.value_dim


class FlashOperands(NamedTuple):
    """Arrays that every kernel takes, in this order."""

    q_mask: jax.Array  # [#b, q_mask_rows, t]: of each conjunction low, high, ids
    k_mask: jax.Array  # [#b, k_mask_rows, s]: of each conjunction ids
    dense_mask: jax.Array  # [#b, #n, dense_mask_rows, dense_mask_width]
    bias: jax.Array  # [#b, #n, #t, #s]
    dropout_counters: jax.Array  # seed, head indices, batch indices
    block_bounds: jax.Array  # [#b, #n, blocks, 4]: first, first full, end of the full ones, end
    block_index: jax.Array  # [#b, #n, blocks, other blocks]


class FlashKernelArguments(NamedTuple):
    """Arguments of a launch besides query, key, value and the tensors of one kernel."""

    static: FlashStaticArguments
    operands: FlashOperands


def kernel_arguments(
    inputs: Inputs, spec: Spec, block_q: int, block_k: int, by_key_block: bool = False
) -> FlashKernelArguments:
    """The arguments for tiles of this shape; the block map is by query block or by key block."""
    rule = inputs.mask or Everything()
    lengths = (inputs.query.shape[1], inputs.key.shape[1])
    # A mask without arrays is known at trace time: its operands are constants of the program.
    run = static_constants if not jax.tree.leaves(rule) else lambda function, *args: function(*args)
    mask, mask_arrays = run(_mask, rule, *lengths)
    blocks, block_arrays = run(_block_map, rule, *lengths, block_q, block_k, by_key_block)
    unused = jnp.zeros((16,), jnp.int32)
    given = {
        "bias": inputs.bias,
        "dropout_counters": _dropout_counters(inputs),
        **mask_arrays,
        **block_arrays,
    }
    arrays = (given.get(name) for name in FlashOperands._fields)
    static = FlashStaticArguments(
        **_geometry(inputs, block_q, block_k), **_softmax(inputs, spec), **mask, **blocks
    )
    operands = FlashOperands(*(unused if x is None else x for x in arrays))
    return FlashKernelArguments(static, operands)


def _geometry(inputs: Inputs, block_q: int, block_k: int) -> dict[str, Any]:
    q_len, kv_len = inputs.query.shape[1], inputs.key.shape[1]
    head_dim, value_dim = inputs.query.shape[3], inputs.value.shape[3]
    return {
        "batch": inputs.query.shape[0],
        "q_len": q_len,
        "kv_len": kv_len,
        "heads": inputs.query.shape[2],
        "kv_heads": inputs.key.shape[2],
        "head_dim": head_dim,
        "value_dim": value_dim,
        "head_width": padded_size(head_dim),
        "value_width": padded_size(value_dim),
        "block_q": block_q,
        "block_k": block_k,
        "q_blocks": -(-q_len // block_q),
        "k_blocks": -(-kv_len // block_k),
        "ragged_queries": int(q_len % block_q != 0),
        "ragged_keys": int(kv_len % block_k != 0),
        "precision": matmul_precision(inputs.query.dtype),
    }


def _softmax(inputs: Inputs, spec: Spec) -> dict[str, Any]:
    """From products to weights: scale, bias, soft cap, sinks, dropout."""
    cap = spec.logits_soft_cap or 0.0
    plain = inputs.bias is None and not cap and spec.softmax_scale > 0
    bias = (0, 0, 0, 0) if inputs.bias is None else inputs.bias.shape
    return {
        "scale": spec.softmax_scale,
        "plain": plain,
        "exp2_scale": (cap or (spec.softmax_scale if plain else 1.0)) * LOG2_E,
        "soft_cap": cap,
        "sinks": inputs.sinks is not None,
        "dropout": inputs.dropout is not None,
        "dropout_shares": inputs.dropout is not None and inputs.dropout.of_shares,
        "dropout_threshold": dropout.threshold(spec.dropout_prob),
        "dropout_scale": 1.0 / (1.0 - spec.dropout_prob),
        "bias": inputs.bias is not None,
        **dict(zip(("bias_batch", "bias_heads", "bias_rows", "bias_width"), bias, strict=True)),
    }


def _dropout_counters(inputs: Inputs) -> jax.Array | None:
    if inputs.dropout is None:
        return None
    seed, batch, head = map(_as_int32, inputs.dropout[:3])
    counters = [seed.reshape(1), head, batch]
    if inputs.dropout.of_shares:
        same = jnp.array([0, 1, 0, 0], jnp.int32)  # each position is its index
        counters += [same if x is None else _as_int32(x) for x in inputs.dropout[3:]]
    return jnp.concatenate(counters)


def _as_int32(x: ArrayLike) -> jax.Array:
    """The low 32 bits, whatever the sign."""
    x = jnp.asarray(x)
    return x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x.astype("uint32"), "int32")


_Static = dict[str, Any]  # fields of FlashStaticArguments
_Arrays = dict[str, jax.Array | None]  # fields of FlashOperands


def _block_map(
    rule: Rule, q_len: int, kv_len: int, block_q: int, block_k: int, by_key_block: bool
) -> tuple[_Static, _Arrays]:
    """The blocks that are visited for each block, and which of them are fully visible."""
    lists = not (rule.contiguous_columns if by_key_block else rule.contiguous)
    state = block_map(rule, q_len, kv_len, block_q, block_k).state
    if by_key_block:
        state = state.swapaxes(2, 3)
    some, full = state != EMPTY, state == FULL
    # The last block may pass the end of the queries, or of the keys: it counts as partial.
    ragged = bool(q_len % block_q if by_key_block else kv_len % block_k)
    if ragged:
        full = full & (jnp.arange(full.shape[3]) < full.shape[3] - 1)
    static = {
        "by_key_block": by_key_block,
        "block_lists": lists,
        "block_map_batched": state.shape[0] > 1,
        "block_map_heads": state.shape[1] > 1,
        "has_partial_blocks": ragged or not isinstance(rule, Everything),
    }
    if lists:
        return static, _lists(some, full)
    first, end = _range(some)
    full_first, full_end = _range(full)
    # Without full blocks the partial ones all lie to the right of an empty full range.
    none = full_first == full_end
    full_first, full_end = (jnp.where(none, first, x) for x in (full_first, full_end))
    return static, {"block_bounds": jnp.stack([first, full_first, full_end, end], -1)}


def _range(active: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first active block on the last axis and the end of them; (0, 0) without any."""
    size = active.shape[-1]
    position = jnp.arange(size, dtype=jnp.int32)
    end = jnp.where(active, position + 1, 0).max(-1)
    return jnp.where(end > 0, jnp.where(active, position, size).min(-1), 0), end


def _lists(some: jax.Array, full: jax.Array) -> _Arrays:
    """The active blocks on the last axis, the full ones first."""
    size = some.shape[-1]
    position = jnp.arange(size, dtype=jnp.int32)
    rank = jnp.where(full, position, jnp.where(some, size + position, 2 * size))
    count = lambda x: x.sum(-1, dtype=jnp.int32)
    bounds = [jnp.zeros_like(count(full)), jnp.zeros_like(count(full)), count(full), count(some)]
    return {
        "block_bounds": jnp.stack(bounds, -1),
        "block_index": jax.lax.sort(rank, dimension=3) % size,
    }


def _mask(rule: Rule, q_len: int, kv_len: int) -> tuple[_Static, _Arrays]:
    """The conjunctions and the dense part of a mask."""
    dense = [part for part in rule.parts() if isinstance(part, Dense | Blocks)]
    others = And(tuple(part for part in rule.parts() if part not in dense))
    conjunctions = kernel_mask.conjunctions(others, _MAX_CONJUNCTIONS)
    if conjunctions is None:
        conjunctions, dense = [()], [Dense(_four_axes(rule.dense(q_len, kv_len)))]
    elif len(dense) > 1:
        dense = [Dense(_four_axes(And(tuple(dense)).dense(q_len, kv_len)))]
    if conjunctions == [()]:
        conjunctions = []
    intervals = [_interval(rules, q_len) for rules in conjunctions]
    id_rules = [[x for x in rules if isinstance(x, Match)] for rules in conjunctions]
    has_low, has_high = (any(one[side] is not None for one in intervals) for side in (0, 1))
    id_pairs = max(map(len, id_rules), default=0)
    q_rows, k_rows, none = [], [], jnp.zeros((1,), jnp.int32)
    for (low, high), rules in zip(intervals, id_rules, strict=True):
        if has_low:
            q_rows.append(jnp.full((1, q_len), -LARGE, jnp.int32) if low is None else low)
        if has_high:
            q_rows.append(jnp.full((1, q_len), LARGE, jnp.int32) if high is None else high)
        for part in [*rules, *[None] * (id_pairs - len(rules))]:
            query, key = (none, none) if part is None else part.id_pair()
            q_rows.append(_two_axes(query, q_len))
            k_rows.append(_two_axes(key, kv_len))
    static: _Static = {
        "conjunctions": len(conjunctions),
        "has_low": int(has_low),
        "has_high": int(has_high),
        "id_pairs": id_pairs,
    }
    dense_mask, dense_static = _dense_mask(dense[0] if dense else None, q_len, kv_len)
    static |= dense_static
    if dense and isinstance(dense[0], Blocks):
        # The last rows: the block of each query and of each key.
        q_index, k_index = _block_positions(dense[0], q_len, kv_len, static)
        q_rows.append(q_index)
        k_rows.append(k_index)
    batch = max((x.shape[0] for x in (*q_rows, *k_rows)), default=1)
    static |= {
        "q_mask_rows": len(q_rows),
        "k_mask_rows": len(k_rows),
        "mask_batched": batch > 1,
    }
    stacked = lambda rows: (
        jnp.stack([jnp.broadcast_to(x, (batch, x.shape[1])) for x in rows], 1) if rows else None
    )
    arrays = {"q_mask": stacked(q_rows), "k_mask": stacked(k_rows), "dense_mask": dense_mask}
    return static, arrays


def _interval(rules: tuple[Rule, ...], q_len: int) -> tuple[jax.Array | None, jax.Array | None]:
    """The first and the last key that each query may see, [#b, t]; None where there is no bound."""
    lows, highs = [], []
    query = jnp.arange(q_len, dtype=jnp.int32)[None]
    for rule in rules:
        if isinstance(rule, Band):
            at = query if rule.q_positions is None else _two_axes(rule.q_positions, q_len)
            lows += [] if rule.low is None else [at + _row(bounded(rule.low))]
            highs += [] if rule.high is None else [at + _row(bounded(rule.high))]
        elif isinstance(rule, Chunks):
            size, k_start = _row(rule.size), _row(rule.k_start)
            low = (query + _row(rule.q_start)) // size * size - k_start
            lows.append(low)
            highs.append(low + size - 1)
        elif isinstance(rule, KeyLength):
            highs.append(jnp.zeros_like(query) + _row(bounded(rule.length)) - 1)
        elif isinstance(rule, QueryLength):
            highs.append(jnp.where(query < _row(rule.length), LARGE, -LARGE))
    low = high = None
    for x in lows:
        low = x if low is None else jnp.maximum(low, x)
    for x in highs:
        high = x if high is None else jnp.minimum(high, x)
    return low, high


def _dense_mask(
    rule: Dense | Blocks | None, q_len: int, kv_len: int
) -> tuple[jax.Array | None, _Static]:
    """The dense part of a mask, [#b, #n, rows, width]."""
    names = ("dense_mask_batched", "dense_mask_heads", "dense_mask_rows", "dense_mask_width")
    if rule is None:
        static = dict(zip(names, (False, 0, 0, 0), strict=True))
        return None, {"dense_mask": False, "dense_mask_blocks": False, **static}
    mask = _four_axes(rule.mask).astype(jnp.int8)
    batch, heads, rows, width = mask.shape
    static = dict(zip(names, (batch > 1, heads, rows, width), strict=True))
    return mask, {"dense_mask": True, "dense_mask_blocks": isinstance(rule, Blocks), **static}


def _block_positions(
    rule: Blocks, q_len: int, kv_len: int, static: _Static
) -> tuple[jax.Array, jax.Array]:
    """The row of a block mask for each query, and its column for each key."""
    found = []
    for length, start, block, size in (
        (q_len, rule.q_start, rule.block_q, static["dense_mask_rows"]),
        (kv_len, rule.k_start, rule.block_k, static["dense_mask_width"]),
    ):
        position = jnp.arange(length, dtype=jnp.int32)[None] + _row(start)
        found.append(jnp.clip(position // block, 0, size - 1))
    return found[0], found[1]


def _row(number: ArrayLike) -> int | jax.Array:
    """A number to combine with [b, length]; an array has one entry for each batch row."""
    return number if isinstance(number, int) else jnp.reshape(number, (-1, 1)).astype(jnp.int32)


def _two_axes(values: jax.Array, length: int) -> jax.Array:
    """[length], [b, length] or one number as [b, length]."""
    values = jnp.atleast_2d(values).astype(jnp.int32)
    return jnp.broadcast_to(values, (values.shape[0], length))


def _four_axes(mask: jax.Array) -> jax.Array:
    return mask if mask.ndim == 4 else mask[None]
