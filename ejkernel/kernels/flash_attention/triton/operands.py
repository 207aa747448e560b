"""A call in the form in which the Triton kernels take it: static facts, and arrays of numbers.

Of a mask the kernels know three things. A *clause* holds where `low[q] <= k <= high[q]` and some
marks of q equal those of k: bands, chunks, lengths, segments and token types are of that form, and
so is every conjunction of them; of a disjunction each member is a clause. A *table* has an entry
for each pair, or for each block of pairs. And the *map* says which tiles to visit at all.
"""

import contextlib
import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.common import dropout
from ejkernel.kernels.common.triton.bridge import matmul_precision
from ejkernel.kernels.common.triton.device_types import StaticArguments
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
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
    Or,
    QueryLength,
    Rule,
    Segments,
    TokenTypes,
)

_MOST_CLAUSES = 6  # a mask of more becomes a table
_INTERVALS = (Band, Chunks, KeyLength, QueryLength)
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode(StaticArguments):
    """All that is static of a launch; what is counted or asked for stands as a number."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    head_width: int  # head_dim, rounded up to what a tile can have
    value_width: int
    block_q: int
    block_k: int
    q_blocks: int
    k_blocks: int
    ragged_queries: int
    ragged_keys: int
    precision: str
    scale: float
    plain: bool  # neither bias nor soft cap: the logits are products times a positive factor
    factor: float  # of the logits in base 2, over what `logits` gives
    soft_cap: float
    sinks: bool
    dropout: bool
    threshold: int
    grow: float  # what dropout multiplies the weights that it keeps by
    bias: bool
    bias_batch: int
    bias_heads: int
    bias_rows: int
    bias_width: int
    columns: bool  # the map lists the query blocks of each key block, not the other way round
    map_lists: bool
    map_batched: bool
    map_heads: bool
    masked: bool  # a full tile is not all there is
    clauses: int
    has_low: int
    has_high: int
    matches: int
    row_marks: int
    column_marks: int
    marks_batched: bool
    table: bool
    table_indexed: bool
    table_batched: bool
    table_heads: int
    table_rows: int
    table_width: int


class Operands(NamedTuple):
    """The arrays behind a mode, in the order in which every kernel takes them."""

    rows: Any  # [#b, row_marks, t]
    columns: Any  # [#b, column_marks, s]
    table: Any  # [#b, #n, rows, width]
    bias: Any  # [#b, #n, #t, #s]
    counters: Any  # seed, head indices, batch indices
    bounds: Any  # [#b, #n, lines, 4]
    index: Any  # [#b, #n, lines, blocks]


class Plan(NamedTuple):
    """A launch of a call in blocks of some sizes."""

    mode: Mode
    operands: Operands


def plan(inputs: Inputs, spec: Spec, block_q: int, block_k: int, columns: bool = False) -> Plan:
    """The plan of a call, with its map by query blocks or by key blocks (`columns`)."""
    rule = inputs.mask or Everything()
    # A mask without arrays is known now: what follows from it is a constant of the program.
    static = not jax.tree.leaves(rule)
    with jax.ensure_compile_time_eval() if static else contextlib.nullcontext():
        mask, arrays = _mask(rule, inputs.query.shape[1], inputs.key.shape[1])
        walk, lists = _map(rule, inputs, block_q, block_k, columns)
    nothing = jnp.zeros((16,), jnp.int32)  # stands for what a kernel does not read
    given = {"bias": inputs.bias, "counters": _counters(inputs), **arrays, **lists}
    operands = (given.get(name) for name in Operands._fields)
    mode = Mode(**_geometry(inputs, block_q, block_k), **_weights(inputs, spec), **mask, **walk)
    return Plan(mode, Operands(*(nothing if x is None else x for x in operands)))


def padded(dim: int) -> int:
    """The width of a tile that holds `dim` columns."""
    return max(16, 1 << (dim - 1).bit_length())


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
        "head_width": padded(head_dim),
        "value_width": padded(value_dim),
        "block_q": block_q,
        "block_k": block_k,
        "q_blocks": -(-q_len // block_q),
        "k_blocks": -(-kv_len // block_k),
        "ragged_queries": int(q_len % block_q != 0),
        "ragged_keys": int(kv_len % block_k != 0),
        "precision": matmul_precision(inputs.query.dtype),
    }


def _weights(inputs: Inputs, spec: Spec) -> dict[str, Any]:
    """How products become weights."""
    cap = spec.logits_soft_cap or 0.0
    plain = inputs.bias is None and not cap and spec.softmax_scale > 0
    bias = (0, 0, 0, 0) if inputs.bias is None else inputs.bias.shape
    return {
        "scale": spec.softmax_scale,
        "plain": plain,
        "factor": (cap or (spec.softmax_scale if plain else 1.0)) * _LOG2_E,
        "soft_cap": cap,
        "sinks": inputs.sinks is not None,
        "dropout": inputs.dropout is not None,
        "threshold": dropout.threshold(spec.dropout_prob),
        "grow": 1.0 / (1.0 - spec.dropout_prob),
        "bias": inputs.bias is not None,
        **dict(zip(("bias_batch", "bias_heads", "bias_rows", "bias_width"), bias, strict=True)),
    }


def _counters(inputs: Inputs) -> jax.Array | None:
    if inputs.dropout is None:
        return None
    seed, batch, head = map(_as_int32, inputs.dropout)
    return jnp.concatenate([seed.reshape(1), head, batch])


def _as_int32(x: Any) -> jax.Array:
    """The low 32 bits, whatever the sign."""
    x = jnp.asarray(x)
    return x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x.astype("uint32"), "int32")


def _map(
    rule: Rule, inputs: Inputs, block_q: int, block_k: int, columns: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Which tiles are visited, and which of them need no mask."""
    q_len, kv_len = inputs.query.shape[1], inputs.key.shape[1]
    lists = not (rule.contiguous_columns if columns else rule.contiguous)
    state = block_map(rule, q_len, kv_len, block_q, block_k).state
    if columns:
        state = state.swapaxes(2, 3)
    some, full = state != EMPTY, state == FULL
    # The last block may pass the end of the queries, or of the keys: it counts as seen in part.
    ragged = bool(q_len % block_q if columns else kv_len % block_k)
    if ragged:
        full = full & (jnp.arange(full.shape[3]) < full.shape[3] - 1)
    facts = {
        "columns": columns,
        "map_lists": lists,
        "map_batched": state.shape[0] > 1,
        "map_heads": state.shape[1] > 1,
        "masked": ragged or not isinstance(rule, Everything),
    }
    if lists:
        return facts, _lists(some, full)
    first, end = _range(some)
    full_first, full_end = _range(full)
    # Of a line without full blocks all are partial, to the right of nothing.
    none = full_first == full_end
    full_first, full_end = (jnp.where(none, first, x) for x in (full_first, full_end))
    return facts, {"bounds": jnp.stack([first, full_first, full_end, end], -1)}


def _range(active: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the active blocks of a line begin and end; (0, 0) without any."""
    size = active.shape[-1]
    position = jnp.arange(size, dtype=jnp.int32)
    end = jnp.where(active, position + 1, 0).max(-1)
    return jnp.where(end > 0, jnp.where(active, position, size).min(-1), 0), end


def _lists(some: jax.Array, full: jax.Array) -> dict[str, jax.Array]:
    """The active blocks of each line, the full ones first."""
    size = some.shape[-1]
    position = jnp.arange(size, dtype=jnp.int32)
    rank = jnp.where(full, position, jnp.where(some, size + position, 2 * size))
    count = lambda x: x.sum(-1, dtype=jnp.int32)
    bounds = [jnp.zeros_like(count(full)), jnp.zeros_like(count(full)), count(full), count(some)]
    return {"bounds": jnp.stack(bounds, -1), "index": jax.lax.sort(rank, dimension=3) % size}


def _mask(rule: Rule, q_len: int, kv_len: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The clauses and the table of a mask."""
    tables = [part for part in rule.parts() if isinstance(part, Dense | Blocks)]
    others = And(tuple(part for part in rule.parts() if part not in tables))
    clauses = _clauses(others)
    if clauses is None:
        clauses, tables = [()], [Dense(_four(rule.dense(q_len, kv_len)))]
    elif len(tables) > 1:
        tables = [Dense(_four(And(tuple(tables)).dense(q_len, kv_len)))]
    if clauses == [()]:
        clauses = []
    intervals = [_interval(clause, q_len) for clause in clauses]
    matches = [[part for part in one if not isinstance(part, _INTERVALS)] for one in clauses]
    has_low, has_high = (any(one[side] is not None for one in intervals) for side in (0, 1))
    most = max(map(len, matches), default=0)
    rows, columns = [], []
    for (low, high), matched in zip(intervals, matches, strict=True):
        if has_low:
            rows.append(jnp.full((1, q_len), -LARGE, jnp.int32) if low is None else low)
        if has_high:
            rows.append(jnp.full((1, q_len), LARGE, jnp.int32) if high is None else high)
        for part in [*matched, *[None] * (most - len(matched))]:
            query, key = (jnp.zeros((1,)), jnp.zeros((1,))) if part is None else part.id_pair()
            rows.append(_two(query, q_len))
            columns.append(_two(key, kv_len))
    facts: dict[str, Any] = {
        "clauses": len(clauses),
        "has_low": int(has_low),
        "has_high": int(has_high),
        "matches": most,
    }
    table, described = _table(tables[0] if tables else None, q_len, kv_len, rows, columns)
    facts |= described | {"row_marks": len(rows), "column_marks": len(columns)}
    batch = max((x.shape[0] for x in (*rows, *columns)), default=1)
    facts["marks_batched"] = batch > 1
    stacked = lambda marks: (
        jnp.stack([jnp.broadcast_to(x, (batch, x.shape[1])) for x in marks], 1) if marks else None
    )
    return facts, {"rows": stacked(rows), "columns": stacked(columns), "table": table}


def _clauses(rule: Rule) -> list[tuple[Rule, ...]] | None:
    """The rule as a disjunction of conjunctions; None when it is not of that form, or too long."""
    if isinstance(rule, Everything):
        return [()]
    if isinstance(rule, (*_INTERVALS, Segments, TokenTypes)):
        return [(rule,)]
    if not isinstance(rule, And | Or):
        return None
    parts = [_clauses(part) for part in rule.rules]
    if any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    if isinstance(rule, Or):
        clauses = [clause for part in known for clause in part]
    else:
        clauses = [tuple(itertools.chain(*one)) for one in itertools.product(*known)]
    return clauses if 0 < len(clauses) <= _MOST_CLAUSES else None


def _interval(clause: tuple[Rule, ...], q_len: int) -> tuple[Any, Any]:
    """The first and the last key that each query may see, [#b, t]; None where there is no bound."""
    lows, highs = [], []
    query = jnp.arange(q_len, dtype=jnp.int32)[None]
    for rule in clause:
        if isinstance(rule, Band):
            at = query if rule.q_positions is None else _two(rule.q_positions, q_len)
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


def _table(
    rule: Any, q_len: int, kv_len: int, rows: list, columns: list
) -> tuple[Any, dict[str, Any]]:
    """The table of a mask, and where in it each query and key looks, as marks after the others."""
    names = ("table_batched", "table_heads", "table_rows", "table_width")
    if rule is None:
        facts = dict(zip(names, (False, 0, 0, 0), strict=True))
        return None, facts | {"table": False, "table_indexed": False}
    table = _four(rule.mask).astype(jnp.int8)
    batch, heads, height, width = table.shape
    facts = dict(zip(names, (batch > 1, heads, height, width), strict=True))
    indexed = isinstance(rule, Blocks)
    if indexed:
        for marks, length, start, block, most in (
            (rows, q_len, rule.q_start, rule.block_q, height),
            (columns, kv_len, rule.k_start, rule.block_k, width),
        ):
            position = jnp.arange(length, dtype=jnp.int32)[None] + _row(start)
            marks.append(jnp.clip(position // block, 0, most - 1))
    return table, facts | {"table": True, "table_indexed": indexed}


def _row(number: Any) -> Any:
    """A number against [b, length]; an array has one entry for each batch row."""
    return number if isinstance(number, int) else jnp.reshape(number, (-1, 1)).astype(jnp.int32)


def _two(marks: jax.Array, length: int) -> jax.Array:
    """[length], [b, length] or one number as [b, length]."""
    marks = jnp.atleast_2d(marks).astype(jnp.int32)
    return jnp.broadcast_to(marks, (marks.shape[0], length))


def _four(mask: jax.Array) -> jax.Array:
    return mask if mask.ndim == 4 else mask[None]
