"""A rule given for whole blocks of queries and keys."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ejkernel.types.rule import Offset, Rule
from ejkernel.types.rule_arrays import Grid, Index, head_of
from ejkernel.types.rule_tree import is_array

_Result = TypeVar("_Result", jax.Array, tuple[jax.Array, jax.Array])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Blocks(Offset):
    """`mask[(q + q_start) // block_q, (k + k_start) // block_k]`: blocks seen whole or not."""

    mask: Bool[Array, "#b #n i j"] | Bool[Array, "#n i j"]
    block_q: int
    block_k: int
    q_start: int | Int[Array, "#b"] | Int[Array, ""] = 0
    k_start: int | Int[Array, "#b"] | Int[Array, ""] = 0

    def head(self, n: Index) -> Rule:
        return self._changed(mask=head_of(self.mask, n))

    def allowed(self, q_len: int, kv_len: int) -> jax.Array:
        def of_row(mask: jax.Array, q_start: Index, k_start: Index) -> jax.Array:
            rows = (jnp.arange(q_len, dtype=jnp.int32) + q_start) // self.block_q
            columns = (jnp.arange(kv_len, dtype=jnp.int32) + k_start) // self.block_k
            return mask.take(rows, -2, mode="clip").take(columns, -1, mode="clip")

        return self._row_by_row(of_row)

    def block_bounds(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        def of_row(mask: jax.Array, q_start: Index, k_start: Index) -> tuple[jax.Array, jax.Array]:
            top, bottom = self._touched(grid.q_ends(), q_start, self.block_q, -2)
            left, right = self._touched(grid.k_ends(), k_start, self.block_k, -1)
            corner = mask.astype(jnp.int32).cumsum(-2).cumsum(-1)
            corner = jnp.pad(corner, ((0, 0), (1, 0), (1, 0)))
            count = lambda row, column: corner.take(row, -2).take(column, -1)
            inside = (
                count(bottom, right) - count(top, right) - count(bottom, left) + count(top, left)
            )
            return inside > 0, inside == (bottom - top)[:, None] * (right - left)

        return self._row_by_row(of_row)

    def _touched(
        self, ends: tuple[jax.Array, jax.Array], start: Index, block: int, axis: int
    ) -> tuple[jax.Array, jax.Array]:
        """The range of our blocks that each block of a grid touches."""
        first, last = ((end.reshape(-1) + start) // block for end in ends)
        size = self.mask.shape[axis]
        return jnp.clip(first, 0, size), jnp.clip(last + 1, 0, size)

    def _row_by_row(self, function: Callable[[jax.Array, Index, Index], _Result]) -> _Result:
        """`function(mask, q_start, k_start)` of each batch row, where there are batch rows."""
        values: tuple[Any, ...] = (self.mask, self.q_start, self.k_start)
        ranks = (3, 0, 0)
        axes = [
            0 if is_array(x) and x.ndim > rank and x.shape[0] > 1 else None
            for x, rank in zip(values, ranks, strict=True)
        ]
        single = [
            x[0] if axis is None and is_array(x) and x.ndim > rank else x
            for x, rank, axis in zip(values, ranks, axes, strict=True)
        ]
        if axes == [None, None, None]:
            return function(*single)
        return jax.vmap(function, in_axes=axes)(*single)

    @property
    def heads(self) -> int:
        return self.mask.shape[-3]

    def features(self) -> frozenset[str]:
        return frozenset({"blocks"})
