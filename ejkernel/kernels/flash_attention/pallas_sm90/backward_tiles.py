"""A warpgroup's walk over the tiles of its rows: products, gradients, sums.

Two products give logits and gradients of weights, 64 rows each; what they become stays in registers
as the left sides of the products that it is summed in. For keys the tiles stand transposed, which
makes that possible.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.flash_attention.pallas_sm90.logits import ROWS, Tile


class Walked:
    """One warpgroup's walk over the tiles of one query head."""

    def __init__(self, work: Any, warpgroup: Any, tile: Tile, row: Any, head: Any, lists: Any):
        self.work, self.warpgroup, self.tile, self.lists = work, warpgroup, tile, lists
        self.part, self.tiles = work.part, work.tiles
        self.shared, self.engine = work.shared, work.engine
        self.shape = (ROWS, work.tiles.columns)
        # Matrices that only a product reads, and those that only a sum reads.
        self.brief = [i for i in range(2) if i not in self.part.summed]
        self.late = [i for i in self.part.summed if i not in self.part.products]
        if not self.part.for_keys:
            ref, rows = work.refs["terms"], gpu.pl.ds(tile.first_row, ROWS)
            self.row_terms = [
                gpu.load(ref.at[row, head, i, rows], gpu.row_layout()) for i in range(2)
            ]

    def over_tiles(self, carry):
        """`(step, sums, taken)` after all tiles."""
        refs, masked = self.work.refs, self.work.operands.masked
        count, self.partial = refs["count"][self.lists], refs["partial"][self.lists]
        self.count, start, program = count, 0, self.narrow_tile if self.narrow else self.whole_tile
        if self.ahead:
            self.wait((0,), carry[0])
        if self.tiles.overlap:
            carry, start, program = self.first_tile(masked, carry), 1, self.next_tile
        carry = lax.fori_loop(start, count, functools.partial(program, masked), carry)
        return self.last_tile(carry) if self.tiles.overlap else carry

    def over_empty_tiles(self, put) -> None:
        """`put(tile, place, None)` for the tiles in which the mask hides everything."""
        count, blocks = self.work.refs["count"][self.lists], self.work.blocks
        empty = lambda j, carry: (put(self.tile, self.place(j), None), carry)[1]
        lax.fori_loop(count, blocks, empty, jnp.int32(0))

    def slot(self, i, step):
        return lax.rem(step, self.work.stages[i])

    def wait(self, which, step) -> None:
        """Until these matrices of a tile are here."""
        for i in which:
            gpu.plgpu.barrier_wait(self.shared.moving_here[i].at[self.slot(i, step)])

    def free(self, which, step) -> None:
        """Others may take the memory of these matrices of a tile."""
        for i in which:
            gpu.plgpu.barrier_arrive(self.shared.moving_free[i].at[self.slot(i, step)])

    def whole_tile(self, with_mask, j, carry):
        """Products, then sums; the weights are found while the second product is under way."""
        step, sums, taken = carry
        products, summed = self.part.products, self.part.summed
        begun = self.before(j, step, with_mask)
        self.wait(products[1:] if self.ahead else products, step)

        def all_of_it(accumulators, values):
            sums, found = accumulators[: len(summed)], accumulators[len(summed) :]
            (taken,) = values

            def between(weights):
                if self.eager:
                    self.sum_up(sums[:1], [weights[0].astype(self.work.dtype)], step, (1,))
                    return self.shared.moving[1].shape.panels
                if self.ahead:
                    gpu.pl.when(j + 1 < self.count)(lambda: self.wait((0,), step + 1))
                return 0

            left, taken[...] = self.gradients(
                found, j, step, with_mask, taken[...], between=between
            )
            self.free(self.brief, step)
            self.wait(self.late, step)
            done = 1 if self.eager else 0
            left = [x.astype(self.work.dtype) for x in left[done:]]
            self.sum_up(sums[done:], left, step, summed[done:])

        starts = [self.start(i, begun, step) for i in products]
        sums, (taken,) = self.engine.run(all_of_it, (*sums, *starts), (taken,))
        self.free(summed, step)
        return step + 1, sums[: len(summed)], taken

    def narrow_tile(self, with_mask, j, carry):
        """One product after the other: the second needs the registers of the first."""
        step, sums, taken = carry
        begun = self.before(j, step, with_mask)

        def product(i):
            self.wait((i,), step)
            body = lambda accumulators, values: self.start_products(accumulators, step, (i,))
            ((found,), _) = self.engine.run(body, (self.start(i, begun, step),))
            return found

        weights = self.weights(j, step, with_mask, product(0))
        left, taken = self.gradients_of(weights, j, step, product(1), taken)
        left = [x.astype(self.work.dtype) for x in left]
        self.free(self.brief, step)
        add = lambda sums, values: self.sum_up(sums, left, step, self.part.summed)
        sums, _ = self.engine.run(add, sums)
        self.free(self.part.summed, step)
        return step + 1, sums, taken

    def first_tile(self, with_mask, carry):
        step, sums, taken = carry
        products = self.part.products
        begun = self.before(0, step, with_mask)
        self.wait(products, step)

        def found(accumulators, values):
            taken, *left = values
            new_left, taken[...] = self.gradients(accumulators, 0, step, with_mask, taken[...])
            for ref, x in zip(left, new_left, strict=True):
                ref[...] = x.astype(self.work.dtype)

        starts = [self.start(i, begun, step) for i in products]
        left = [gpu.full(self.shape, 0.0, self.work.dtype) for _ in self.part.summed]
        _, (taken, *left) = self.engine.run(found, starts, (taken, *left))
        self.free(self.brief, step)
        return step + 1, sums, taken, tuple(left)

    def next_tile(self, with_mask, j, carry):
        """Products of this tile and sums of the one before are under way together."""
        step, sums, taken, left = carry
        products, summed = self.part.products, self.part.summed
        begun = self.before(j, step, with_mask)
        self.wait(products, step)
        self.wait(self.late, step - 1)

        def both(accumulators, values):
            sums, found = accumulators[: len(summed)], accumulators[len(summed) :]
            taken, *left = values

            def begin():
                self.sum_up(sums, [x[...] for x in left], step - 1, summed)
                return sum(self.shared.moving[i].shape.panels for i in summed)

            new = self.gradients(found, j, step, with_mask, taken[...], begin)
            new_left, taken[...] = lax.optimization_barrier(new)
            self.engine.wait()
            for ref, x in zip(left, new_left, strict=True):
                ref[...] = x.astype(self.work.dtype)

        starts = [self.start(i, begun, step) for i in products]
        sums, (taken, *left) = self.engine.run(both, (*sums, *starts), (taken, *left))
        self.free(summed, step - 1)
        self.free(self.brief, step)
        return step + 1, sums[: len(summed)], taken, tuple(left)

    def last_tile(self, carry):
        step, sums, taken, left = carry
        self.wait(self.late, step - 1)
        add = lambda sums, values: self.sum_up(sums, left, step - 1, self.part.summed)
        sums, _ = self.engine.run(add, sums)
        self.free(self.part.summed, step - 1)
        return step, sums, taken

    def before(self, j, step, with_mask):
        """What a logit begins with: -inf where the mask hides a pair, the bias; None for nothing.

        Before the tile is waited for: then the waiting keeps what this reads, and what the products
        begin with, from needing registers at the same time.
        """
        bias = None
        if "bias" in self.work.refs:
            bias = self.work.brought.take(self.shared, self.engine, self.warpgroup, step)
            bias = self.tile.bias(self.place(j)) if bias is None else bias.astype(jnp.float32)
            if self.work.spec.logits_soft_cap is not None:  # of -inf there is a finite cap
                bias = jnp.maximum(bias, -1e30)
            bias = bias * (1.0 / self.work.spec.softmax_scale)
        if not with_mask:
            return bias
        shown = lambda: gpu.full(self.shape, 0.0) if bias is None else bias
        partial = lambda: jnp.where(self.tile.visible(self.place(j)), shown(), -jnp.inf)
        return lax.cond(j < self.partial, partial, shown)

    def start(self, i, begun, step):
        """What a product is added to: terms of rows, the bias, and what the mask hides."""
        if i == 1:
            return self.term(1, step)
        logits = self.term(0, step) if self.work.lse_first else gpu.full(self.shape, 0.0)
        return logits if begun is None else logits + begun

    def start_products(self, accumulators, step, which) -> None:
        # What is the same in every tile must not look so: the compiler would find out where each
        # part of a matrix begins before the loop, and keep all of that in registers.
        mine, first = lax.optimization_barrier((self.warpgroup, jnp.int32(0)))
        for accumulator, i in zip(accumulators, which, strict=True):
            held, moving = self.shared.held[i], self.shared.moving[i]
            slot = self.slot(i, step) if self.work.stages[i] > 1 else first
            self.engine.matmul_nt(accumulator, held, mine, moving, slot)

    def sum_up(self, accumulators, left, step, which) -> None:
        """Add a tile: weights times gradients of outputs, gradients of logits times the rest."""
        for accumulator, x, i in zip(accumulators, left, which, strict=True):
            self.engine.matmul_nn(accumulator, x, self.shared.moving[i], self.slot(i, step))

    def gradients(
        self, accumulators, j, step, with_mask, taken, begin=lambda: 0, between=lambda weights: 0
    ):
        """The products of a tile, and what becomes of them.

        `begin` starts other matmuls behind them and says how many, `between` more of them when the
        weights are known.
        """
        self.start_products(accumulators, step, self.part.products)
        others = begin()
        second = sum(self.shared.moving[i].shape.panels for i in self.part.products[1:])
        logits = self.engine.read_accumulator(accumulators[0], others + second)
        weights = self.weights(j, step, with_mask, logits)
        if self.ahead:
            weights = _computed(*weights)
        others += between(weights)
        d_weights = self.engine.read_accumulator(accumulators[1], others) if second else None
        return self.gradients_of(weights, j, step, d_weights, taken)

    # How the exponentials get hidden behind the second product: the assembler would move them
    # behind the wait for it, but not past a matmul that needs them, and not past a branch.

    @property
    def eager(self) -> bool:
        """Whether values are summed as soon as there are weights."""
        return self.part.summed == (1, 0) and not self.tiles.overlap

    @property
    def ahead(self) -> bool:
        """Whether what the next tile begins with is waited for in the middle of this one."""
        short = self.narrow or (self.part.rows and self.work.dims[0] > 192)  # of registers
        return self.part.summed == (0,) and not self.tiles.overlap and not short

    @property
    def narrow(self) -> bool:
        """Whether registers are short: a wide sum, and the bits of dropout for every weight."""
        wide = self.part.summed == (0,) and self.work.dims[0] > 192
        return wide and self.tile.drops and not self.tiles.overlap

    def place(self, j):
        if not self.tile.needs_place and not self.part.logits:
            return 0
        index = self.work.refs["index"][self.lists * self.work.blocks + j]
        return index * self.tiles.columns

    def term(self, i, step):
        """A number for each query, along the rows or columns that are queries."""
        if not self.part.for_keys:
            return gpu.broadcast_rows(self.row_terms[i], self.shape)
        part = gpu.load(self.shared.terms.at[self.slot(0, step), i], gpu.column_layout())
        return gpu.broadcast_columns(part, self.shape)

    def weights(self, j, step, with_mask, products):
        """Weights as they are summed, as they are, and times the slope of their logits.

        The latter are negative where dropout has taken a weight away.
        """
        at = self.place(j)
        logits, factor, slope = self.tile.logits(products, at, with_mask=False, with_bias=False)
        exponents = logits * factor
        if not self.work.lse_first:
            exponents = exponents - self.term(0, step)
        weights = used = steep = jnp.exp2(exponents)
        if slope is not None:
            if with_mask:  # what began at -inf is still there, though its cap is finite
                weights = used = jnp.where(products > -jnp.inf, weights, 0.0)
            steep = weights * slope
        if self.tile.drops:
            kept = self.tile.kept(at)
            used, steep = jnp.where(kept, used, 0.0), jnp.where(kept, steep, -steep)
        if self.narrow:
            used, steep = lax.optimization_barrier((used.astype(self.work.dtype), steep))
        return used, weights, steep

    def gradients_of(self, found, j, step, d_weights, taken):
        """What the tile's sums are made of, from the weights and their gradients."""
        used, weights, steep = found
        if d_weights is None:
            return (used,), taken
        if self.tile.drops:
            d_weights = jnp.where(steep > 0.0, d_weights, self.term(1, step))
            steep = jnp.abs(steep)
        d_logits = steep * d_weights
        if self.part.rows:
            # Without a cap, both kinds are the same.
            capped = self.part.rows == "weights" and self.work.spec.logits_soft_cap is not None
            numbers = weights * d_weights if capped else d_logits
            taken = taken + gpu.reduce_rows(numbers, jnp.add, jnp.sum)
        if self.part.logits:
            self.work.put_logits(self.tile, self.place(j), d_logits)
        of = {0: d_logits, 1: used}
        return tuple(of[i] for i in self.part.summed), taken


def _computed(*values):
    """The same, known to be computed here; what is the same twice takes registers once."""
    different = {id(x): x for x in values}
    after = lax.optimization_barrier(tuple(different.values()))
    return tuple(dict(zip(different, after, strict=True))[id(x)] for x in values)
