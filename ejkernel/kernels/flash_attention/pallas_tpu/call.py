"""What the TPU kernels of flash attention share: how a call is cut, and what a tile gets to see.

    query   [b, n, t, h]   blocks of `group` heads on one key head and `block_q` rows
    key     [b, k, s, h]   blocks of `block_k` rows
    rows    [b, n, 1, t]   a number for each query, along the lanes

Tiles stand keys by queries: what a row of logits has in common, its maximum, its sum, takes one
register for 128 queries, and is found without moving anything between lanes.

The grid is (batch rows, blocks of heads, tiles); the tiles are those of the list, so that what the
mask hides is neither loaded nor visited. Where the mask differs between rows or heads, the list
holds them all and the grid counts one.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel import settings
from ejkernel.kernels.common import dropout
from ejkernel.kernels.common.precision import tile_product
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.flash_attention.pallas_tpu.mask import TileMask
from ejkernel.kernels.flash_attention.pallas_tpu.tile_list import TileList, tile_list
from ejkernel.ops.meshes import result_shape
from ejkernel.types.rules import Everything

Settle = Callable[[Any], Any]  # from the results of a kernel to what is used of them

LOG2_E = math.log2(math.e)
LANES = 128
# Beside the state of a tile, two bits, a list says where results, and rows of them, begin and end.
_FIRST, _LAST, _FIRST_OF_ROW, _LAST_OF_ROW, _FLAGS = 4, 8, 16, 32, 6


class TileSize(NamedTuple):
    """The size of a tile."""

    queries: int
    keys: int
    heads: int  # query heads of one key head that a step works on


class Tile(NamedTuple):
    """Where a step stands: a batch row, a block of heads, a block of queries, one of keys."""

    batch: Any
    heads: Any
    queries: Any
    keys: Any


class Operand(NamedTuple):
    """An array that a kernel reads, and the block of it that a step gets."""

    array: jax.Array
    spec: pl.BlockSpec


class Result(NamedTuple):
    """An array that a kernel writes, and the block that a step does.

    `zeroed`: it is 0 where no step writes.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: pl.BlockSpec
    zeroed: bool = False


class Call:
    """One call of a kernel that may use `vmem` bytes, and whose results `settle` is to see.

    `by_keys`: results are blocks of keys. `first_query`: how many queries of the whole come before
    these.
    """

    def __init__(
        self,
        inputs: Inputs,
        spec: Spec,
        size: TileSize,
        *,
        vmem: int,
        settle: Settle | None = None,
        by_keys: bool = False,
        first_query: int = 0,
    ):
        self.vmem, self.settle = vmem, settle
        self.inputs, self.spec, self.by_keys, self.first_query = inputs, spec, by_keys, first_query
        self.batch, self.q_len, self.q_heads, _ = inputs.query.shape
        _, self.kv_len, self.kv_heads, _ = inputs.key.shape
        rule = inputs.mask or Everything()
        self.size = size._replace(heads=1) if rule.heads > 1 else size
        self.mask = TileMask(rule, self.q_len, self.kv_len)
        self.tiles: TileList = tile_list(
            rule, self.q_len, self.kv_len, size.queries, size.keys, by_keys=by_keys
        )
        self.ragged_queries = self.q_len % size.queries != 0
        self.ragged_keys = self.kv_len % size.keys != 0
        self.plain = self.mask.always and not (self.ragged_queries or self.ragged_keys)

    # Which tile a step works on

    @property
    def grid(self) -> tuple[Any, Any, Any]:
        head_blocks = self.q_heads // self.size.heads
        return (
            1 if self.tiles.batch > 1 else self.batch,
            1 if self.tiles.heads > 1 else head_blocks,
            self.tiles.count,
        )

    def tile(self, row: Any, heads: Any, step: Any, result: Any, packed: Any) -> Tile:
        """The tile of a step, read from the list in scalar memory."""
        mine, row_of_list = result[step], 0
        if not self.one_list:
            owner, mine = _split(mine, self.tiles.blocks)
            row_of_list = owner
            if self.tiles.heads > 1:
                row_of_list, heads = _split(owner, self.tiles.heads)
        if self.tiles.batch > 1:
            row = row_of_list
        other = jax.lax.shift_right_logical(packed[step], _FLAGS)
        return Tile(row, heads, *((other, mine) if self.by_keys else (mine, other)))

    def spec_of(self, block: tuple, index: Any) -> pl.BlockSpec:
        """The block spec whose block is that of `index(tile)`."""

        def index_map(row, heads, step, result, packed, *scalars):
            return index(self.tile(row, heads, step, result, packed))

        return pl.BlockSpec(block, index_map)

    # Operands

    def of_queries(self, x: jax.Array) -> Operand:
        """[b, t, n, d] -> [b, n, t, d]"""
        block = (None, self.size.heads, self.size.queries, x.shape[-1])
        return Operand(
            jnp.swapaxes(x, 1, 2),
            self.spec_of(block, lambda at: (at.batch, at.heads, at.queries, 0)),
        )

    def of_keys(self, x: jax.Array, *, transposed: bool = False) -> Operand:
        """[b, s, k, d] -> [b, k, s, d], or [b, k, d, s]"""
        place = lambda at: (at.batch, self.key_head(at))
        if transposed:
            spec = self.spec_of(
                (None, None, x.shape[-1], self.size.keys), lambda at: (*place(at), 0, at.keys)
            )
            return Operand(jnp.transpose(x, (0, 2, 3, 1)), spec)
        block = (None, None, self.size.keys, x.shape[-1])
        index = lambda at: (*place(at), at.keys, 0)
        return Operand(jnp.swapaxes(x, 1, 2), self.spec_of(block, index))

    def key_head(self, at: Tile) -> Any:
        """The key head of a block of query heads."""
        blocks = self.q_heads // self.kv_heads // self.size.heads
        return at.heads if blocks == 1 else jax.lax.div(at.heads, blocks)

    def of_rows(self, x: jax.Array, fill: float) -> Operand:
        """[b, n, t] -> [b, n, 1, t], with `fill` past the end of the last block."""
        missing = -self.q_len % self.size.queries
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing)), constant_values=fill)
        block = (None, self.size.heads, 1, self.size.queries)
        index = lambda at: (at.batch, at.heads, 0, at.queries)
        return Operand(x[:, :, None], self.spec_of(block, index))

    def mask_operands(self) -> list[Operand]:
        """The arrays of the mask that are no scalars, as the tile stands; they come last."""
        return [
            self._mask_operand(x.kind, x.array) for x in self.mask.operands if x.kind != "scalar"
        ]

    def _mask_operand(self, kind: str, x: jax.Array) -> Operand:
        row = lambda at: at.batch if x.shape[0] > 1 else 0
        if kind == "blocks":
            head = lambda at: at.heads if x.shape[1] > 1 else 0
            block = (None, None, *x.shape[2:])
            return Operand(x, self.spec_of(block, lambda at: (row(at), head(at), 0, 0)))
        if kind == "tile":
            return self.of_tile(x)
        size = self.size.queries if kind == "query" else self.size.keys
        which = (lambda at: at.queries) if kind == "query" else (lambda at: at.keys)
        if kind == "key":  # a column
            spec = self.spec_of((None, size, 1), lambda at: (row(at), which(at), 0))
            return Operand(x[:, :, None], spec)
        return Operand(
            x[:, None], self.spec_of((None, 1, size), lambda at: (row(at), 0, which(at)))
        )

    def of_tile(self, x: jax.Array) -> Operand:
        """[#b, #n, #t, #s] -> [#b, #n, #s, #t]"""
        many = [size > 1 for size in x.shape]
        heads = self.size.heads if many[1] else 1
        sizes = (self.size.keys if many[3] else 1, self.size.queries if many[2] else 1)

        def index(at: Tile) -> tuple:
            places = (at.keys if many[3] else 0, at.queries if many[2] else 0)
            return (
                at.batch if many[0] else 0,
                at.heads if many[1] else 0,
                *places,
            )

        return Operand(jnp.swapaxes(x, 2, 3), self.spec_of((None, heads, *sizes), index))

    def scalars(self) -> list[jax.Array]:
        """What goes into scalar memory: the list, the numbers of the mask, the dropout counters."""
        numbers = [x.array for x in self.mask.operands if x.kind == "scalar"]
        counters = [] if self.inputs.dropout is None else list(self.inputs.dropout)
        return [
            self._results(),
            self._packed(),
            *numbers,
            *(x.reshape(-1).astype(jnp.int32) for x in counters),
        ]

    @property
    def one_list(self) -> bool:
        """Whether all batch rows and heads have the same tiles."""
        return self.tiles.batch == 1 and self.tiles.heads == 1

    def _results(self) -> jax.Array:
        """The results of the list so that batch row, head and block are told apart by bits alone:
        scalar units divide slowly, and every step asks for those of several.
        """
        if self.one_list:
            return self.tiles.result
        owner, mine = jnp.divmod(self.tiles.result, self.tiles.blocks)
        row, head = jnp.divmod(owner, self.tiles.heads)
        owner = head + (row << _bits(self.tiles.heads))
        return mine + (owner << _bits(self.tiles.blocks))

    def _packed(self) -> jax.Array:
        """The blocks and states of the list, and where results and rows of them begin and end."""
        result, count = self.tiles.result, self.tiles.count
        rows = result // self.tiles.blocks
        state, other = self.tiles.packed & 3, self.tiles.packed >> 2
        is_last = jnp.arange(result.shape[0]) == count - 1
        for one, first, last in ((result, _FIRST, _LAST), (rows, _FIRST_OF_ROW, _LAST_OF_ROW)):
            changes = one[1:] != one[:-1]
            begins = jnp.pad(changes, (1, 0), constant_values=True)
            ends = jnp.pad(changes, (0, 1)) | is_last
            state += jnp.where(begins, first, 0) + jnp.where(ends, last, 0)
        return (other << _FLAGS) + state

    # Inside a kernel

    def here(self, refs: "Refs") -> "Here":
        """The step that is running."""
        result, packed = refs.result, refs.packed
        step = pl.program_id(2)
        flag = lambda which: packed[step] & which != 0
        return Here(
            tile=self.tile(pl.program_id(0), pl.program_id(1), step, result, packed),
            state=packed[step] & 3,
            first=flag(_FIRST),
            last=flag(_LAST),
            first_of_row=flag(_FIRST_OF_ROW),
            last_of_row=flag(_LAST_OF_ROW),
        )

    def indices(self, tile: Tile) -> tuple[jax.Array, jax.Array]:
        """The indices of the queries and of the keys of a tile, a row and a column of it."""
        of = lambda start, size, line, axis: (
            start * size + jax.lax.broadcasted_iota(jnp.int32, line, axis)
        )
        queries, keys, _ = self.size
        return of(tile.queries, queries, (1, queries), 1), of(tile.keys, keys, (keys, 1), 0)

    def allowed(self, tile: Tile, refs: "Refs") -> Any:
        """The pairs of a tile that count: seen by the mask, and not past the ends."""
        values, scalars = [], iter(refs.numbers)
        last = sum(x.kind != "scalar" for x in self.mask.operands)
        arrays = iter(refs.inputs[len(refs.inputs) - last :])
        for operand in self.mask.operands:
            if operand.kind == "scalar":
                number = next(scalars)
                values.append(number[tile.batch if operand.array.shape[0] > 1 else 0])
            else:
                x = next(arrays)[...]
                values.append(x[0] if operand.kind == "tile" else x)
        q, k = self.indices(tile)
        allowed = None if self.mask.always else self.mask.allowed(values, q, k)
        ends = [k < self.kv_len] if self.ragged_keys else []
        if self.ragged_queries and self.by_keys and self.inputs.bias is not None:
            ends.append(q < self.q_len)  # past the end a bias may be anything
        for end in ends:
            allowed = end if allowed is None else allowed & end
        return allowed

    def kept(self, tile: Tile, head: Any, refs: "Refs") -> jax.Array:
        """The pairs of a tile that dropout leaves."""
        seed, rows, heads = refs.numbers[-3:]
        q, k = self.indices(tile)
        number = heads[tile.heads * self.size.heads + head]
        q += self.first_query
        return dropout.keep(self.spec.dropout_prob, seed[0], rows[tile.batch], number, q, k)

    def logits(self, products: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, Any]:
        """Logits in base 2, and what the soft cap makes of their gradient."""
        scale, cap = self.spec.softmax_scale, self.spec.logits_soft_cap
        if bias is None and cap is None:
            return products * (scale * LOG2_E), None
        logits = products * scale
        if bias is not None:
            logits += bias.astype(logits.dtype)
        if cap is None:
            return logits * LOG2_E, None
        ratio = jnp.tanh(logits * (1.0 / cap))
        return ratio * (cap * LOG2_E), 1.0 - ratio * ratio

    def run(
        self,
        kernel: Any,
        operands: list[Operand],
        results: list[Result],
        scratch: list,
        *,
        in_turn: bool = False,
    ) -> Any:
        """Start `kernel(call, refs)`; `in_turn`: no two of its steps at the same time."""
        scalars = self.scalars()
        zeroed = [i for i, x in enumerate(results) if x.zeroed]
        zeros = [jnp.zeros(results[i].shape, results[i].dtype) for i in zeroed]
        first, behind = len(scalars) + len(operands), len(operands) + len(zeroed)
        arrays = (*scalars, *(x.array for x in operands), *zeros)
        outer = "arbitrary" if in_turn else "parallel"

        def body(result, packed, *refs):
            numbers, refs = refs[: len(scalars) - 2], refs[len(scalars) - 2 :]
            kernel(self, Refs(result, packed, numbers, refs[: len(operands)], refs[behind:]))

        outputs = pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=self.grid,
                in_specs=[
                    *(x.spec for x in operands),
                    *(pl.BlockSpec(memory_space=pl.ANY) for _ in zeroed),
                ],
                out_specs=[x.spec for x in results],
                scratch_shapes=scratch,
            ),
            out_shape=[result_shape(x.shape, x.dtype, *arrays) for x in results],
            input_output_aliases={first + i: result for i, result in enumerate(zeroed)},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=(outer, outer, "arbitrary"),
                vmem_limit_bytes=self.vmem,
                disable_bounds_checks=True,  # the list names no block that is not there
            ),
            interpret=settings.interpret(),
        )(*arrays)
        return outputs if self.settle is None else self.settle(outputs)


class Refs(NamedTuple):
    """What a kernel is given: the list, numbers, blocks of the operands, results and scratch."""

    result: Any
    packed: Any
    numbers: tuple
    inputs: tuple
    outputs: tuple


class Here(NamedTuple):
    """A step: its tile, the state of it, whether it begins or ends a result, or a row of them."""

    tile: Tile
    state: Any
    first: Any
    last: Any
    first_of_row: Any
    last_of_row: Any


def _bits(count: int) -> int:
    """How many bits numbers below this take."""
    return (count - 1).bit_length()


def _split(number: Any, count: int) -> tuple[Any, Any]:
    """What stands above the bits of a number below `count`, and that number."""
    bits = _bits(count)
    return jax.lax.shift_right_logical(number, bits), number & ((1 << bits) - 1)


def product(left: jax.Array, right: jax.Array, *, transpose_right: bool = False) -> jax.Array:
    """`left @ right`, or with the right one transposed, accumulated in float32."""
    return tile_product(left, right, (1, 1 if transpose_right else 0))
