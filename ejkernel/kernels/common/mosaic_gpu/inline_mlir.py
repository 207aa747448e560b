"""What Pallas Mosaic GPU cannot express: operations of each thread on its own part of a tile.

A WGMMA accumulator has registers of shape [1, columns / 8, 1, 1, 2, 1, ...]: pairs of neighbouring
columns, eight apart, of two rows of each thread. Arrays here are Mosaic's `FragmentedArray`s.
"""

import functools
import importlib
import math
from typing import Any

import numpy as np


def mask_columns(x: Any, first: Any, last: Any) -> Any:
    """`x` between the columns `first` and `last` of each row, -inf elsewhere."""
    ir: Any = importlib.import_module("jax._src.lib.mlir").ir
    dialects: Any = importlib.import_module("jax._src.lib.mlir.dialects")
    arith, vector = dialects.arith, dialects.vector
    i32, i64, f32 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64), ir.F32Type
    number = lambda value: arith.constant(i32, value)
    thread = arith.index_cast(i32, dialects.gpu.thread_id(dialects.gpu.Dimension.x))
    # A thread's columns come in pairs, 8 apart; its first one follows from its lane in a quad.
    start = arith.shli(arith.andi(thread, number(3)), number(1))

    def bits_before(column: Any) -> Any:
        """A bit for each of this thread's columns, in their order: 1 if before this one."""
        column = arith.subi(column, start)
        pairs = arith.shli(arith.shrsi(column, number(3)), number(1))
        count = arith.addi(pairs, arith.minsi(arith.andi(column, number(7)), number(2)))
        count = arith.maxsi(arith.minsi(count, number(32)), number(0))
        power = arith.shli(arith.constant(i64, 1), arith.extui(i64, count))
        return arith.subi(arith.trunci(i32, power), number(1))

    halves = x.registers.shape[4]  # rows of a thread
    ends = [None if end is None else end.registers.reshape(-1) for end in (first, last)]
    own = lambda register: vector.extract(register, [], [0])
    hidden = arith.constant(f32.get(), -math.inf)
    after = np.empty_like(x.registers)
    for half in range(halves):
        bits = number(-1)
        if ends[1] is not None:
            bits = bits_before(arith.addi(own(ends[1][half]), number(1)))
        if ends[0] is not None:
            early = arith.xori(bits_before(own(ends[0][half])), number(-1))
            bits = arith.andi(bits, early)
        for place in np.ndindex(x.registers.shape):
            if place[4] != half:
                continue
            register, kept = x.registers[place], []
            for i in range(2):
                bit = 1 << 2 * place[1] + i
                bit = arith.andi(bits, number(bit - 2**32 if bit == 2**31 else bit))
                seen = arith.cmpi(arith.CmpIPredicate.ne, bit, number(0))
                kept.append(arith.select(seen, vector.extract(register, [], [i]), hidden))
            after[place] = vector.from_elements(register.type, kept)
    return type(x)(_registers=after, _layout=x.layout, _is_signed=x.is_signed)


def multiply_unless_one(x: Any, repeated: Any, factors: Any) -> Any:
    """`x * repeated` in threads with a factor other than 1; others skip the multiplication."""
    ir: Any = importlib.import_module("jax._src.lib.mlir").ir
    dialects: Any = importlib.import_module("jax._src.lib.mlir.dialects")
    arith, scf, vector = dialects.arith, dialects.scf, dialects.vector

    def numbers(register: Any) -> list[Any]:
        if not isinstance(register.type, ir.VectorType):
            return [register]
        size = ir.VectorType(register.type).shape[0]
        return [vector.extract(register, [], [i]) for i in range(size)]

    one = arith.constant(ir.F32Type.get(), 1.0)
    own = [number for register in factors.registers.flat for number in numbers(register)]
    differs = [arith.cmpf(arith.CmpFPredicate.UNE, number, one) for number in own]
    some = functools.reduce(arith.ori, differs)
    before = list(x.registers.flat)
    branch = scf.IfOp(some, [register.type for register in before], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(list((x * repeated).registers.flat))
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(before)
    after = np.asarray(list(branch.results), dtype=object).reshape(x.registers.shape)
    return type(x)(_registers=after, _layout=x.layout, _is_signed=x.is_signed)
