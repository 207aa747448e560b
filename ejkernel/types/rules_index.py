"""Rules that follow from indices and a few numbers: bands, chunks, lengths."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ejkernel.types.rule import Offset, Rule
from ejkernel.types.rule_arrays import Grid, Index, Start, bounded, cut, per_row, shift, take


def _bound_numbers(rule: Rule, *names: str) -> None:
    """Clip the static numbers of a new rule: kernels compute with them in int32."""
    for name in names:
        value = getattr(rule, name)
        if isinstance(value, int):
            object.__setattr__(rule, name, bounded(value))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Band(Rule):
    """`low <= k - p(q) <= high`, with `p(q)` the query's position, its index by default.

    None leaves a side open. Causal with offset `o` is `Band(None, o)`; a window of `l` keys to the
    left and `r` to the right is `Band(o - l, o + r)`.
    """

    low: int | Int[Array, "#b"] | Int[Array, ""] | None = None
    high: int | Int[Array, "#b"] | Int[Array, ""] | None = None
    q_positions: Int[Array, "#b t"] | Int[Array, "t"] | None = None

    def __post_init__(self) -> None:
        _bound_numbers(self, "low", "high")

    def sliced(self, q_start: Start, q_len: int, k_start: Start, k_len: int) -> Rule:
        if self.q_positions is None:
            by, positions = q_start - k_start, None
        else:
            by, positions = -k_start, take(self.q_positions, q_start, q_len, -1, fill=0)
        return self._changed(
            low=shift(self.low, by), high=shift(self.high, by), q_positions=positions
        )

    def allowed(self, q_len: int, kv_len: int) -> jax.Array:
        key = jnp.arange(kv_len, dtype=jnp.int32)  # [k]
        if self.q_positions is None:
            position = jnp.arange(q_len, dtype=jnp.int32)[:, None]  # [q, 1]
        else:
            position = self.q_positions[..., None, :, None]  # [..., 1, q, 1]
        allowed = jnp.ones((1, 1, 1), bool)
        if self.low is not None:
            allowed = allowed & (key >= position + per_row(bounded(self.low)))
        if self.high is not None:
            allowed = allowed & (key <= position + per_row(bounded(self.high)))
        return allowed

    def block_bounds(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        first_key, last_key = grid.k_ends()
        if self.q_positions is None:
            first, last = grid.q_ends()
        else:
            positions = cut(self.q_positions, grid.block_q)  # [..., nq, block]
            first = positions.min(-1)[..., None, :, None]  # [..., 1, nq, 1]
            last = positions.max(-1)[..., None, :, None]
        some = every = jnp.ones((1, 1, 1), bool)
        if self.low is not None:
            low = per_row(bounded(self.low))
            some = some & (last_key >= first + low)
            every = every & (first_key >= last + low)
        if self.high is not None:
            high = per_row(bounded(self.high))
            some = some & (first_key <= last + high)
            every = every & (last_key <= first + high)
        return some, every

    @property
    def contiguous(self) -> bool:
        return True

    @property
    def contiguous_columns(self) -> bool:
        return self.q_positions is None

    def features(self) -> frozenset[str]:
        present = {
            "window": self.low is not None,
            "causal": self.low is None and self.high is not None,
            "positions": self.q_positions is not None,
        }
        return frozenset(name for name, is_present in present.items() if is_present)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Chunks(Offset):
    """`(q + q_start) // size == (k + k_start) // size`: query and key lie in the same chunk."""

    size: int | Int[Array, "#b"] | Int[Array, ""]
    q_start: int | Int[Array, "#b"] | Int[Array, ""] = 0
    k_start: int | Int[Array, "#b"] | Int[Array, ""] = 0

    def __post_init__(self) -> None:
        _bound_numbers(self, "size")

    def allowed(self, q_len: int, kv_len: int) -> jax.Array:
        query = jnp.arange(q_len, dtype=jnp.int32)[None, :, None]
        key = jnp.arange(kv_len, dtype=jnp.int32)[None, None, :]
        return self._chunk(query, self.q_start) == self._chunk(key, self.k_start)

    def block_bounds(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        q_first, q_last = (self._chunk(end[None], self.q_start) for end in grid.q_ends())
        k_first, k_last = (self._chunk(end[None], self.k_start) for end in grid.k_ends())
        some = (q_first <= k_last) & (k_first <= q_last)
        every = (q_first == k_last) & (k_first == q_last)
        return some, every

    def _chunk(self, index: jax.Array, start: Index) -> jax.Array:
        return (index + per_row(start)) // per_row(self.size)

    @property
    def contiguous(self) -> bool:
        return True

    @property
    def contiguous_columns(self) -> bool:
        return True

    def features(self) -> frozenset[str]:
        return frozenset({"chunks"})


class _Length(Rule):
    """Shared by `KeyLength` and `QueryLength`."""

    length: int | jax.Array

    def __post_init__(self) -> None:
        _bound_numbers(self, "length")

    @property
    def contiguous(self) -> bool:
        return True

    @property
    def contiguous_columns(self) -> bool:
        return True

    def features(self) -> frozenset[str]:
        return frozenset({"lengths"})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KeyLength(_Length):
    """`k < length`."""

    length: int | Int[Array, "#b"] | Int[Array, ""]

    def sliced(self, q_start: Start, q_len: int, k_start: Start, k_len: int) -> Rule:
        return self._changed(length=shift(self.length, -k_start))

    def allowed(self, q_len: int, kv_len: int) -> jax.Array:
        return jnp.arange(kv_len, dtype=jnp.int32)[None, None, :] < per_row(bounded(self.length))

    def block_bounds(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        first, last = grid.k_ends()
        length = per_row(bounded(self.length))
        return first[None] < length, last[None] < length


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QueryLength(_Length):
    """`q < length`."""

    length: int | Int[Array, "#b"] | Int[Array, ""]

    def sliced(self, q_start: Start, q_len: int, k_start: Start, k_len: int) -> Rule:
        return self._changed(length=shift(self.length, -q_start))

    def allowed(self, q_len: int, kv_len: int) -> jax.Array:
        return jnp.arange(q_len, dtype=jnp.int32)[None, :, None] < per_row(bounded(self.length))

    def block_bounds(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        first, last = grid.q_ends()
        length = per_row(bounded(self.length))
        return first[None] < length, last[None] < length
