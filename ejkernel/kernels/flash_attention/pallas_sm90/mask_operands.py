"""The arrays that the Hopper kernels read for mask, bias and dropout.

A mask comes in a normal form: bounds of each query, pairs of ids, a dense remainder, unions of
these. XLA computes it before the kernel starts; that of a mask without arrays is computed when the
call is traced.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.flash_attention.inputs import Inputs
from ejkernel.types.rules import (
    Band,
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

# No index of a token is as far from zero as this, and sums of two do not overflow.
_FAR = 2**29
# Ids of a query and of a key that match nothing.
_NO_QUERY, _NO_KEY = -(2**31), -(2**31) + 1


class KernelMask(NamedTuple):
    """The pairs of a partial tile that are visible: those that satisfy everything here.

    Attributes:
        lower: the first key that each query may see.
        upper: the last key that each query may see.
        id_pairs: ids of queries and ids of keys that must be equal.
        dense: a mask of pairs, nonzero where allowed.
        unions: of each of these, one member must be satisfied.
    """

    lower: jax.Array | None = None  # [#b, t]
    upper: jax.Array | None = None  # [#b, t]
    id_pairs: tuple[tuple[jax.Array, jax.Array], ...] = ()  # [#b, t], [#b, s]
    dense: jax.Array | None = None  # [#b, #n, t, s] int8
    unions: tuple[tuple["KernelMask", ...], ...] = ()

    def repeated(self, q_size: int) -> "KernelMask":
        """The mask of `q_size` queries that are the given ones again and again."""
        rows = lambda x, axis: jnp.take(x, np.arange(q_size) % x.shape[axis], axis)
        return KernelMask(
            lower=None if self.lower is None else rows(self.lower, 1),
            upper=None if self.upper is None else rows(self.upper, 1),
            id_pairs=tuple((rows(query, 1), key) for query, key in self.id_pairs),
            dense=None if self.dense is None else rows(self.dense, 2),
            unions=tuple(tuple(one.repeated(q_size) for one in union) for union in self.unions),
        )


def why_not(rule: Rule) -> str | None:
    """Why the kernels cannot evaluate this mask, or None."""
    supported = (Band, Chunks, Dense, Everything, KeyLength, Or, QueryLength, Segments, TokenTypes)
    kinds = [type(part).__name__ for part in rule.parts() if not isinstance(part, supported)]
    if kinds:
        return f"does not support masks made of {', '.join(sorted(set(kinds)))}"
    members = [one for part in rule.parts() if isinstance(part, Or) for one in part.rules]
    return next(filter(None, map(why_not, members)), None)


def is_overlapping_interval(part: Rule) -> bool:
    """Whether each query sees a range of keys, and neighbours see ranges that overlap."""
    if isinstance(part, Band):
        return part.q_positions is None
    if isinstance(part, Segments):
        return part.documents is not None
    return isinstance(part, Chunks | KeyLength | QueryLength)


def partial_tile_mask(
    rule: Rule, q_len: int, kv_len: int, q_size: int, kv_size: int
) -> KernelMask | None:
    """The mask of partial tiles, padded to whole blocks; None when every pair is visible."""
    if isinstance(rule, Everything) and kv_len == kv_size:
        return None
    if not jax.tree.leaves(rule):
        with jax.ensure_compile_time_eval():
            return padded_kernel_mask(rule, q_len, kv_len, q_size, kv_size)
    return padded_kernel_mask(rule, q_len, kv_len, q_size, kv_size)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def padded_kernel_mask(
    rule: Rule, q_len: int, kv_len: int, q_size: int, kv_size: int
) -> KernelMask:
    """The normal form of a mask, padded to whole blocks; it hides the padding of the keys."""
    mask = _kernel_mask(rule, q_len, kv_len, q_size, kv_size)
    if kv_len < kv_size or not jax.tree.leaves(mask):
        last = jnp.full((1, q_size), kv_len - 1, jnp.int32)
        return mask._replace(upper=last if mask.upper is None else jnp.minimum(mask.upper, last))
    return mask


def _kernel_mask(rule: Rule, q_len: int, kv_len: int, q_size: int, kv_size: int) -> KernelMask:
    """The normal form of a mask, which says nothing about keys past the last one."""
    query = jnp.arange(q_size, dtype=jnp.int32)[None]  # [1, t]
    lowers, uppers, id_pairs, unions, dense = [], [], [], [], []
    per_row = lambda number: jnp.asarray(number, jnp.int32).reshape(-1, 1)  # [#b, 1]
    near = lambda number: jnp.clip(per_row(number), -_FAR, _FAR)
    for part in rule.parts():
        if isinstance(part, Band):
            place = query
            if part.q_positions is not None:
                place = jnp.clip(_padded(part.q_positions, q_size, 0), -_FAR, _FAR)
            if part.low is not None:
                lowers.append(place + near(part.low))
            if part.high is not None:
                uppers.append(place + near(part.high))
        elif isinstance(part, Chunks):
            size = per_row(part.size)
            first = (query + per_row(part.q_start)) // size * size - per_row(part.k_start)
            lowers.append(first)
            uppers.append(first + size - 1)
        elif isinstance(part, KeyLength):
            uppers.append(near(part.length) - 1)
        elif isinstance(part, QueryLength):
            uppers.append(jnp.where(query < near(part.length), _FAR, -1))
        elif isinstance(part, Segments) and part.documents is not None:
            first, last = _document_bounds(part, q_size)
            lowers.append(first)
            uppers.append(last)
        elif isinstance(part, Segments | TokenTypes):
            q_ids, kv_ids = part.id_pair()
            kv_ids = _padded(kv_ids, kv_size, _NO_KEY)
            id_pairs.append((_padded(q_ids, q_size, _NO_QUERY), kv_ids))
        elif isinstance(part, Or):
            union = tuple(_kernel_mask(one, q_len, kv_len, q_size, kv_size) for one in part.rules)
            if not union:
                uppers.append(jnp.full((1, 1), -1, jnp.int32))
            elif all(map(jax.tree.leaves, union)):  # else one of them allows every pair
                unions.append(union)
        elif isinstance(part, Dense):
            mask = part.mask.reshape((-1, *part.mask.shape[-3:]))
            if mask.shape[1] == mask.shape[2] == 1:  # hides whole keys
                keys = jnp.where(mask[:, 0, 0], jnp.int32(0), jnp.int32(_NO_KEY))
                keys = jnp.broadcast_to(keys, (keys.shape[0], kv_len))
                id_pairs.append(
                    (jnp.zeros((1, q_size), jnp.int32), _padded(keys, kv_size, _NO_KEY))
                )
                continue
            whole = jnp.broadcast_to(mask, (*mask.shape[:2], q_len, kv_len)).astype(jnp.int8)
            padding = ((0, 0), (0, 0), (0, q_size - q_len), (0, kv_size - kv_len))
            dense.append(jnp.pad(whole, padding))
    unions += [(KernelMask(dense=mask),) for mask in dense[1:]]
    spread = lambda x: jnp.broadcast_to(x, (x.shape[0], q_size))
    bound = lambda these, choose: spread(functools.reduce(choose, these)) if these else None
    lower, upper = bound(lowers, jnp.maximum), bound(uppers, jnp.minimum)
    return KernelMask(lower, upper, tuple(id_pairs), dense[0] if dense else None, tuple(unions))


def _document_bounds(part: Segments, size: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last token of the document of each token; of padding none.

    Two bounds of a row are read once, where the ids of keys would be read with every tile.
    """
    if part.starts is not None:
        starts = part.starts.reshape(-1, 1, part.starts.shape[-1]).astype(jnp.int32)
        token = jnp.arange(size, dtype=jnp.int32)[:, None]
        first = jnp.where(starts <= token, starts, -1).max(-1)
        end = jnp.where(starts > token, starts, _FAR).min(-1)
        return jnp.where(first < 0, _FAR, first), jnp.where(end == _FAR, -1, end - 1)
    ids = _padded(part.q_ids, size, -1)
    number = jnp.arange(part.documents, dtype=jnp.int32)  # pyright: ignore[reportArgumentType]
    lengths = (ids[:, None] == number[:, None]).sum(-1, dtype=jnp.int32)[:, None]  # [#b, 1, m]
    before = jnp.where(number < ids[..., None], lengths, 0).sum(-1, dtype=jnp.int32)
    own = jnp.where(number == ids[..., None], lengths, 0).sum(-1, dtype=jnp.int32)
    return before, before + own - 1


def _padded(numbers: jax.Array, size: int, fill: int) -> jax.Array:
    """[#b, size] from [..., length]."""
    numbers = numbers.reshape(-1, numbers.shape[-1]).astype(jnp.int32)
    return jnp.pad(numbers, ((0, 0), (0, size - numbers.shape[1])), constant_values=fill)


@dataclasses.dataclass(frozen=True)
class MaskCondition:
    """A `KernelMask` inside a kernel: the prefix of its arrays' names, and how many there are."""

    prefix: str
    id_pairs: int
    unions: tuple[tuple["MaskCondition", ...], ...]


@dataclasses.dataclass(frozen=True)
class TileOperands:
    """The arrays of mask, bias and dropout, by the names under which a kernel gets them."""

    arrays: dict[str, jax.Array]
    condition: MaskCondition | None

    @property
    def masked(self) -> bool:
        return self.condition is not None


def tile_operands(
    inputs: Inputs,
    mask: KernelMask | None,
    q_size: int,
    kv_size: int,
    transposed: bool = False,
    transpose_bias: bool = False,
) -> TileOperands:
    """The operands of tiles of queries with keys, or `transposed` of keys with queries.

    Arrays of pairs are transposed with the tiles. The bias has a flag of its own, because a staged
    bias is transposed on its way to registers.
    """
    arrays: dict[str, jax.Array] = {}

    def add_condition(mask: KernelMask, prefix: str) -> MaskCondition:
        parts = {"lower": mask.lower, "upper": mask.upper, "dense": mask.dense}
        if mask.dense is not None and transposed:
            parts["dense"] = jnp.swapaxes(mask.dense, 2, 3)
        for i, (query, key) in enumerate(mask.id_pairs):
            parts |= {f"query_id_{i}": query, f"key_id_{i}": key}
        arrays.update({prefix + name: x for name, x in parts.items() if x is not None})
        unions = tuple(
            tuple(add_condition(one, f"{prefix}{i}_{j}_") for j, one in enumerate(union))
            for i, union in enumerate(mask.unions)
        )
        return MaskCondition(prefix, len(mask.id_pairs), unions)

    condition = None if mask is None else add_condition(mask, "")
    if inputs.bias is not None:
        bias = _padded_bias(inputs.bias, q_size, kv_size)
        arrays["bias"] = jnp.swapaxes(bias, 2, 3) if transpose_bias else bias
    if inputs.dropout is not None:
        seed, batch, head = (jnp.asarray(x).reshape(-1) for x in inputs.dropout)
        arrays |= {"seed": seed, "batch_index": batch, "head_index": head}
    return TileOperands(arrays, condition)


def _padded_bias(bias: jax.Array, q_size: int, kv_size: int) -> jax.Array:
    t, s = bias.shape[2:]
    padding = [(0, 0), (0, 0), (0, 0 if t == 1 else q_size - t), (0, 0 if s == 1 else kv_size - s)]
    return jnp.pad(bias, padding) if any(b for _, b in padding) else bias
