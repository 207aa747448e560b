"""How two warpgroups of the joint backward pass walk over queries: the tiles, and one tile."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.flash_attention.pallas_sm90.logits import ROWS, Tile

HOLDERS = 2  # warpgroups that hold keys
KEYS = ROWS * HOLDERS  # of a unit of work
QUERIES = 64  # of a tile
STAGES = 3  # tiles of queries in flight
SLOTS = 2  # tiles of gradients of logits in shared memory


class Tiles:
    """The tiles of one line and query head, in the order in which they are walked.

    Units that walk at the same time should be at different tiles, or their additions wait for each
    other. With a causal mask those of a head begin at their own places and walk upward; as they are
    dealt, those of the next lap begin the later the shorter they are, and walk downward. Where a
    line visits everything, each begins elsewhere.
    """

    def __init__(self, work: Any, row, head, line, lap):
        self.work, self.row, self.head, self.line = work, row, head, line
        list_row = row if work.list_rows > 1 else 0
        list_head = head if work.list_heads > 1 else 0
        self.list = (list_row * work.list_heads + list_head) * work.lines + line
        self.count = work.refs["count"][self.list]
        downward, whole = lax.rem(lap, 2) == 1, self.count == work.blocks
        first = jnp.where(whole, lax.div(line * work.blocks, work.lines), 0)
        self.first = jnp.where(downward, self.count - 1 - first, first)
        self.stride = jnp.where(downward, -1, 1)

    def tile(self, j):
        """Where the queries of a tile begin, and whether some pairs of it are hidden."""
        at = self.first + j * self.stride
        at = jnp.where(at < 0, at + self.count, jnp.where(at < self.count, at, at - self.count))
        refs = self.work.refs
        start = refs["index"][self.list * self.work.blocks + at] * QUERIES
        hides = at < refs["partial"][self.list]
        # What lies past the last key is 0, but its weights need not be finite.
        return start, hides | (self.line == self.work.lines - 1) if self.work.ragged else hides


class Walked:
    """One warpgroup's walk over the tiles of one query head."""

    def __init__(self, work: Any, warpgroup, unit, tiles: Tiles):
        self.work, self.warpgroup, self.unit, self.walk = work, warpgroup, unit, tiles
        self.shared, self.engine = work.shared, work.engine
        self.shape = (ROWS, QUERIES)

    def first_tile(self, step, sums):
        """All of a tile but its part of the sum of keys."""
        (logits,) = self.with_logits(0, step, (), lambda sums: None)
        return step + 1, (self.gradients(step, sums[0], logits), sums[1])

    def next_tile(self, j, carry):
        """The same, with what was left of the tile before beside its first product."""
        step, sums = carry
        d_key, logits = self.with_logits(
            j, step, sums[1:], lambda sums: self.add_keys(sums[0], step - 1)
        )
        gpu.plgpu.barrier_arrive(self.shared.moving_free.at[self.slot(step - 1)])
        return step + 1, (self.gradients(step, sums[0], logits), d_key)

    def last_tile(self, step, sums):
        """What is left of the last one."""
        (d_key,), _ = self.engine.run(
            lambda sums, values: self.add_keys(sums[0], step - 1), sums[1:]
        )
        gpu.plgpu.barrier_arrive(self.shared.moving_free.at[self.slot(step - 1)])
        return step, (sums[0], d_key)

    def slot(self, step):
        return lax.rem(step, STAGES)

    def with_logits(self, j, step, sums, begin) -> tuple:
        """`sums` after what `begin` does to them, and beside that the products of a tile's logits.

        They are the logits less the log-sum-exp, in units of products; -inf where a pair is hidden.
        """
        slot = self.slot(step)
        hidden = self.hidden(j)
        gpu.plgpu.barrier_wait(self.shared.moving_here.at[slot])

        def both(accumulators, values):
            begin(accumulators[:-1])
            self.product(0, accumulators[-1], slot)

        start = self.term(0, slot)
        start = start if hidden is None else start + hidden
        return self.engine.run(both, (*sums, start))[0]

    def product(self, i, accumulator, slot) -> None:
        # Not known to be the same in every tile: what follows from it would be kept in registers.
        mine = lax.optimization_barrier(self.warpgroup)
        held, moving = self.shared.held[i], self.shared.moving[i]
        self.engine.matmul_nt(accumulator, held, mine, moving, slot)

    def add_keys(self, d_key, step) -> None:
        """Begin to add to the sum of keys, from the gradients of logits in shared memory."""
        left = self.shared.d_logits.at[self.own_room(step)]
        self.engine.plain(d_key, left, self.shared.moving[0], self.slot(step))

    def own_room(self, step):
        return lax.rem(step, SLOTS) * HOLDERS + self.warpgroup

    def gradients(self, step, d_value, logits) -> jax.Array:
        """The sum of values with a tile added; leaves the gradients of the tile's logits."""
        shared, dtype, slot = self.shared, self.work.dtype, self.slot(step)
        factor = self.work.spec.softmax_scale * LOG2_E
        weights = lax.optimization_barrier(jnp.exp2(logits * factor).astype(dtype))
        # A branch, over which nothing is moved: before it there is no room for the next product.
        self.wait_for_room(step)

        def both(accumulators, values):
            d_value, d_weights = accumulators
            self.product(1, d_weights, slot)
            self.engine.matmul_nn(d_value, weights, shared.moving[1], slot)
            d_weights = self.engine.read_accumulator(d_weights, shared.moving[1].shape.panels)
            d_logits = (weights.astype(jnp.float32) * d_weights).astype(dtype)
            self.leave(step, d_logits)

        (d_value, _), _ = self.engine.run(both, (d_value, self.term(1, slot)))
        return d_value

    def wait_for_room(self, step) -> None:
        """Until the gradients of logits before these have been used."""
        here = self.shared.d_logits_free.at[lax.rem(step, SLOTS)]
        gpu.pl.when(step >= SLOTS)(lambda: gpu.plgpu.barrier_wait(here))

    def leave(self, step, d_logits) -> None:
        """Gradients of logits, for who sums up those of queries."""
        shared = self.shared
        shared.d_logits.at[self.own_room(step)][...] = d_logits
        gpu.plgpu.commit_smem()
        gpu.plgpu.barrier_arrive(shared.d_logits_here.at[lax.rem(step, SLOTS)])

    def hidden(self, j):
        """-inf where the mask hides a pair, 0 elsewhere; None without a mask."""
        if not self.work.operands.masked:
            return None
        at, hides = self.walk.tile(j)
        zero = lambda: gpu.full(self.shape, 0.0)

        def partial():
            visible = self.mask().visible(at)
            return jnp.where(visible, zero(), -jnp.inf)

        return lax.cond(hides, partial, zero)

    def mask(self) -> Tile:
        """What says which pairs are hidden; nothing of it stays in registers."""
        work, (unit, head) = self.work, lax.optimization_barrier((self.unit, self.walk.head))
        row, _, line = work.unpack(unit)
        first_row = line * KEYS + self.warpgroup * ROWS
        return Tile(work.spec, work.operands, work.refs, row, head, first_row, QUERIES, True)

    def term(self, i, slot):
        """A number for each query, along the columns."""
        part = gpu.load(self.shared.terms.at[slot, i], gpu.column_layout())
        return gpu.broadcast_columns(part, self.shape)
