"""Pallas for NVIDIA GPUs: what differs between its versions, and a stand-in on CPUs.

A kernel's programs are warpgroups of 128 threads. Everything that touches the tensor cores goes
through an `Engine`: `HARDWARE` issues warpgroup matmuls, `EMULATION` computes the same with `jnp`,
because Pallas' interpreter knows barriers and asynchronous copies but not every form of a matmul.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common.mosaic_gpu import registers as in_registers

# The multiprocessors of an H100 SXM and of an H200: how many blocks a persistent kernel starts.
MULTIPROCESSORS = 132
# Shared memory a block may have, less what the compiler keeps for barriers and reductions.
SHARED_BYTES = 232448 - 4096
# Threads of all warpgroups of a block share the register file of a multiprocessor.
REGISTERS = 65536

# Whether the interpreter looks for accesses that no barrier orders, which takes some time.
detect_races = False

try:
    # JAX 0.10 needs absl-py for it, which it does not install.
    plgpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    pl: Any = importlib.import_module("jax.experimental.pallas")
    _missing = None
except ImportError as error:  # pragma: no cover
    plgpu = pl = None
    _missing = f"needs Pallas for NVIDIA GPUs, which cannot be imported ({error})"


def why_missing(interpreted: bool = False) -> str | None:
    """Why these kernels cannot be built with this JAX, or None."""
    if _missing is None and interpreted and not hasattr(plgpu, "barrier_arrive_and_wait"):
        return "is interpreted by JAX 0.12 or newer only"
    return _missing


def registers(consumers: int) -> tuple[int, int] | None:
    """Registers of a thread that computes and of one that copies, so that all fit.

    A warpgroup that asks for more than the others have given back waits for ever. With one that
    computes there is nothing to give: a thread starts with as many as it can have.

    >>> registers(1), registers(2), registers(3)
    (None, (240, 24), (160, 32))
    """
    if consumers == 1:
        return None
    each = REGISTERS // (128 * (consumers + 1)) // 8 * 8
    copying = {2: 24, 3: 32}[consumers]
    return (each * (consumers + 1) - copying) // consumers // 8 * 8, copying


def share_registers(consumers: int, copying: bool) -> None:
    """Give back the registers that copying does not need, or take them."""
    if shares := registers(consumers):
        action = "decrease" if copying else "increase"
        plgpu.set_max_registers(shares[copying], action=action)


def divide_roles(consumers: int, copy: Callable[[], None], compute: Callable[[Any], None]) -> None:
    """The last warpgroup runs `copy()`, the others `compute(warpgroup)`; results end up written."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == consumers)
    def _copying():
        share_registers(consumers, copying=True)
        copy()

    @pl.when(warpgroup < consumers)
    def _computing():
        share_registers(consumers, copying=False)
        compute(warpgroup)
        plgpu.wait_smem_to_gmem(0)


def swizzle(dim: int) -> int | None:
    """Bytes in which rows of `dim` 16-bit numbers are interleaved; None if there is no such way."""
    return next((size for size in (128, 64, 32) if dim * 2 % size == 0), None)


def shared_tile(dtype: Any, *shape: int, width: int | None = None) -> Any:
    """Shared memory for matrices [..., rows, dim] as the tensor cores read them.

    Two that are multiplied are cut into tiles of the same width; by default as wide as can be.
    """
    size = swizzle(width or shape[-1])
    transforms = (plgpu.TilingTransform((8, (size or 0) // 2)), plgpu.SwizzleTransform(size))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


class Matrices:
    """Matrices [rows, dim] in shared memory, as copies write and the tensor cores read them.

    A copy cuts global memory into the tiles of the tensor cores, which it can if there are whole
    tiles of 8 rows. Other lengths come in `strips` of a few columns, each of which is laid out the
    same whether or not it is thought of as cut; what lies outside the array arrives as 0 and is not
    written back. Every strip is a copy, and a matmul, of its own.
    """

    def __init__(self, dtype: Any, count: int, rows: int, dim: int, whole: bool):
        self.dtype, self.count, self.rows, self.dim, self.whole = dtype, count, rows, dim, whole
        fewest = -(-dim // 16) * 16
        wide = (size for size in (64, 32, 16) if -(-dim // size) * size == fewest)
        self.width = dim if whole else next(wide)
        self.strips = -(-dim // self.width)
        self.columns = self.width * self.strips  # with those that only fill the last strip

    def views(self, interpreted: bool) -> list[Any]:
        """The memory as the tensor cores see it, after how copies see it where that differs."""
        if self.whole:
            return [shared_tile(self.dtype, self.count, self.rows, self.dim)]
        shape = (self.count, self.strips, self.rows, self.width)
        cut = shared_tile(self.dtype, *shape)
        swizzled = plgpu.SwizzleTransform(swizzle(self.width))
        seen = plgpu.SMEM(shape, self.dtype, transforms=(swizzled,))
        return [cut] if interpreted else [seen, cut]


def allocate(interpreted: bool, *matrices: Matrices) -> Any:
    """Shared memory for these matrices, which take turns in using it."""
    views = [view for one in matrices for view in one.views(interpreted)]
    return views[0] if len(views) == 1 else plgpu.RefUnion(*views)


def bind(interpreted: bool, ref: Any, *matrices: Matrices) -> list["Bound"]:
    """The matrices that were allocated together, inside a kernel."""
    counts = [len(one.views(interpreted)) for one in matrices]
    refs = iter([ref] if sum(counts) == 1 else list(ref))
    views = [[next(refs) for _ in range(count)] for count in counts]
    return [Bound(one, view[0], view[-1]) for one, view in zip(matrices, views, strict=True)]


class Bound:
    """Matrices inside a kernel: as copies see them, and as the tensor cores do."""

    def __init__(self, shape: Matrices, copied: Any, cut: Any):
        self.shape, self.copied, self.cut = shape, copied, cut

    def parts(self) -> list[tuple[int, int]]:
        """The columns of each strip."""
        width = self.shape.width
        return [(i * width, (i + 1) * width) for i in range(self.shape.strips)]

    def at(self, index: Any, strip: int) -> Any:
        return self.cut.at[index] if self.shape.whole else self.cut.at[index, strip]

    def fetch(self, array: Any, row: Any, rows: Any, head: Any, index: Any, here: Any) -> None:
        """Begin to copy array[row, rows, head] into matrix `index`."""
        for strip, columns in self._columns():
            room = self.copied.at[index] if self.shape.whole else self.copied.at[index, strip]
            plgpu.copy_gmem_to_smem(array.at[row, rows, head, columns], room, here)

    def put(self, index: Any, value: jax.Array) -> None:
        """Write matrix `index`, as the tensor cores would read it."""
        for strip, (start, stop) in enumerate(self.parts()):
            self.at(index, strip)[...] = value[:, start:stop] if self.shape.strips > 1 else value

    def store(self, array: Any, row: Any, rows: Any, head: Any, index: Any) -> None:
        """Begin to copy matrix `index` to array[row, rows, head]."""
        for strip, columns in self._columns():
            room = self.copied.at[index] if self.shape.whole else self.copied.at[index, strip]
            plgpu.copy_smem_to_gmem(room, array.at[row, rows, head, columns])

    def _columns(self):
        if self.shape.whole:
            yield 0, slice(None)
            return
        # A start that is not known before it runs may reach past the end.
        nowhere = lax.axis_index("block") * 0
        for strip, (start, _) in enumerate(self.parts()):
            yield strip, pl.ds(nowhere + start, self.shape.width)


def kernel(body: Callable[..., None], interpreted: bool, **arguments: Any) -> Callable[..., Any]:
    """`plgpu.kernel` with layouts said by hand, fast `exp2`, and no barriers but our own."""
    # Only JAX 0.12 tells the interpreter by argument.
    if interpreted:
        arguments["interpret"] = plgpu.InterpretGPUParams(detect_races=detect_races)
    return plgpu.kernel(
        body,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=True,
        ),
        **arguments,
    )


def rows_layout() -> Any:
    """One number for each row of a tile."""
    return plgpu.Layout.WGMMA.reduce(1)


def columns_layout() -> Any:
    """One number for each column of a tile."""
    return plgpu.Layout.WGMMA.reduce(0)


def load(ref: Any, layout: Any) -> jax.Array:
    """Numbers from global memory, straight to the registers of a layout."""
    index = inspect.signature(plgpu.load).parameters.get("idx")
    if index is not None and index.default is inspect.Parameter.empty:  # before JAX 0.11
        return plgpu.load(ref, ..., layout=layout, optimized=False)
    return plgpu.load(ref, layout=layout, optimized=False)


def full(shape: tuple[int, ...], value: float, dtype: Any = jnp.float32) -> jax.Array:
    """A constant tile [rows, columns], or a constant for each row [rows]."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else rows_layout()
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each row, repeated in all its columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (0,)), plgpu.Layout.WGMMA)


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each column, repeated in all its rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (1,)), plgpu.Layout.WGMMA)


def column_index(shape: tuple[int, ...]) -> jax.Array:
    """The index of each element's column."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def row_index(rows: int) -> jax.Array:
    """The index of each row, [rows]."""
    return plgpu.layout_cast(lax.iota(jnp.int32, rows), rows_layout())


def reduce_rows(x: jax.Array, combine: Callable, reduce: Callable) -> jax.Array:
    """Each row's sum or maximum: halves first, so that no long chain of steps builds up."""
    width = x.shape[1]
    while width % 16 == 0:
        width //= 2
        x = combine(x[:, :width], x[:, width:])
    return reduce(x, axis=1)


def barriers(count: int, arrivals: int = 1) -> Any:
    """Barriers that open after so many arrivals of a warpgroup or of a copy."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def each_unit(order: Any, program: Callable[..., Any], known: Any = None) -> None:
    """`step = program(lap, step, unit, known)` for this block of threads' units of work.

    `order` [laps, blocks of threads] says which they are, -1 for none; `known`, of the same shape,
    holds a number about each. They are read a lap ahead, so that no unit begins with waiting.
    """
    laps, _ = order.shape
    block = lax.axis_index("block")
    arrays = (order,) if known is None else (order, known)

    def of(lap: Any) -> tuple:
        return tuple(array[jnp.minimum(lap, laps - 1), block] for array in arrays)

    def one(lap: Any, carry: Any) -> Any:
        (step, done), unit = carry
        following = of(lap + 1)
        run = lambda state: (program(state[1], state[0], *unit), state[1] + 1)
        return lax.cond(unit[0] >= 0, run, lambda state: state, (step, done)), following

    lax.fori_loop(0, laps, one, ((jnp.int32(0), jnp.int32(0)), of(jnp.int32(0))))


class Hardware:
    """Matmuls on the tensor cores: asynchronous, in order."""

    def run(self, body: Callable, accumulators: Sequence[Any], values: Sequence[Any] = ()) -> tuple:
        """What `body(accumulator_refs, value_refs)` leaves behind, all its matmuls done."""
        start = tuple(plgpu.ACC.init(x) for x in accumulators)
        return pl.run_state(lambda refs: body(*refs))((start, tuple(values)))

    def inner(self, accumulator: Any, left: Bound, i: Any, right: Bound, j: Any) -> None:
        """Begin `accumulator += left[i] @ right[j].T`."""
        for strip in range(left.shape.strips):
            plgpu.wgmma(accumulator, left.at(i, strip), right.at(j, strip).transpose((1, 0)))

    def outer(self, accumulator: Any, left: Any, right: Bound, j: Any) -> None:
        """Begin `accumulator += left @ right[j]`, in as many matmuls as `right` has strips.

        `left` may lie in registers or in shared memory.
        """
        for strip, (start, stop) in enumerate(right.parts()):
            part = accumulator if right.shape.strips == 1 else accumulator.at[:, start:stop]
            plgpu.wgmma(part, left, right.at(j, strip))

    def read(self, accumulator: Any, unfinished: int) -> jax.Array:
        """The accumulator, once no more than `unfinished` matmuls are under way."""
        # The compiler knows of no connection between waiting and the registers it waits for.
        return lax.optimization_barrier(
            plgpu.wgmma_accumulator_load(accumulator, wait_n=unfinished)
        )

    def wait(self) -> None:
        """Until every matmul is done."""
        plgpu.wgmma_wait(0)

    def scale_rows(self, x: jax.Array, factors: jax.Array, always: bool) -> jax.Array:
        """`x` with each row times its factor; unless `always`, skipped where all factors are 1."""
        if always:
            return x * along_rows(factors, x.shape)
        layout = plgpu.Layout.WGMMA
        kind = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

        @plgpu.inline_mgpu(arg_types=(layout, layout, rows_layout()), return_type=kind)
        def scale(context: Any, x: Any, repeated: Any, factors: Any) -> Any:
            # A branch of each thread on its own rows, which Pallas cannot say.
            return in_registers.multiplied_where(x, repeated, factors)

        return scale(x, along_rows(factors, x.shape), factors)

    def hide(self, x: jax.Array, first: jax.Array | None, last: jax.Array | None) -> jax.Array:
        """`x` with -inf before the column `first` of each row, and after `last`."""
        layout = plgpu.Layout.WGMMA
        kind = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
        ends = [end for end in (first, last) if end is not None]

        @plgpu.inline_mgpu(arg_types=(layout, *[rows_layout()] * len(ends)), return_type=kind)
        def between(context: Any, x: Any, *ends: Any) -> Any:
            # Each thread has up to 32 columns of a row: comparing takes four instructions for each
            # of them, a bit of one number little more than one.
            given = iter(ends)
            both = (None if end is None else next(given) for end in (first, last))
            return in_registers.shown(x, *both)

        return between(x, *ends)


class _Held:
    """A value that stands where a kernel has a reference to registers."""

    def __init__(self, value: Any):
        self.value = value

    def __getitem__(self, index: Any) -> Any:
        return self.value

    def __setitem__(self, index: Any, value: Any) -> None:
        self.value = value


class Emulation(Hardware):
    """The same computation in the interpreter, each matmul done at once."""

    def run(self, body: Callable, accumulators: Sequence[Any], values: Sequence[Any] = ()) -> tuple:
        held = tuple(map(_Held, accumulators)), tuple(map(_Held, values))
        body(*held)
        return tuple(tuple(x.value for x in part) for part in held)

    def inner(self, accumulator: Any, left: Bound, i: Any, right: Bound, j: Any) -> None:
        for strip in range(left.shape.strips):
            a, b = (x.at(k, strip)[...].astype(jnp.float32) for x, k in ((left, i), (right, j)))
            accumulator.value += jnp.dot(a, b.T, precision=lax.Precision.HIGHEST)
        self._as_the_tensor_cores_read()

    def outer(self, accumulator: Any, left: jax.Array, right: Bound, j: Any) -> None:
        strips = [right.at(j, strip)[...] for strip in range(right.shape.strips)]
        whole = jnp.concatenate(strips, axis=1).astype(jnp.float32)
        left = left.astype(jnp.float32)
        accumulator.value += jnp.dot(left, whole, precision=lax.Precision.HIGHEST)
        self._as_the_tensor_cores_read()

    def _as_the_tensor_cores_read(self) -> None:
        """They read as copies write; a thread's own reads need a fence before the next copy."""
        plgpu.commit_smem()

    def read(self, accumulator: Any, unfinished: int) -> jax.Array:
        return accumulator.value

    def wait(self) -> None:
        pass

    def scale_rows(self, x: jax.Array, factors: jax.Array, always: bool) -> jax.Array:
        return x * along_rows(factors, x.shape)

    def hide(self, x: jax.Array, first: jax.Array | None, last: jax.Array | None) -> jax.Array:
        column = column_index(x.shape)
        if first is not None:
            x = jnp.where(column >= along_rows(first, x.shape), x, -jnp.inf)
        if last is not None:
            x = jnp.where(column <= along_rows(last, x.shape), x, -jnp.inf)
        return x


HARDWARE, EMULATION = Hardware(), Emulation()
