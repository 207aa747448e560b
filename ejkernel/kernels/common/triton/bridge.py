"""The one place that knows jax-triton: launch a Triton kernel, interpret it, compile it ahead.

A file of kernels never imports Triton. It declares its functions with `@kernel` and a global
`tl: Any = None`; the first use of any of them loads Triton, puts its language there and Triton's
form of every function in the place of its Python form. So such a file can be imported anywhere, and
whether Triton interprets is settled before Triton is loaded, which is when it wants to know.

A kernel takes pointers to inputs, pointers to outputs, and one static value named `mode`.
"""

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import settings
from ejkernel.ops.meshes import varying_axes
from ejkernel.ops.platform import Device, device_of

_OLDEST = (8, 0)  # compute capability
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_EIGHT_BITS = {"int8": "i8", "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
_NAMES = {**_DTYPES, **_EIGHT_BITS, "int32": "i32"}
# Multiprocessors of a device that is known by its kind alone.
_MULTIPROCESSORS = {(8, 0): 108, (9, 0): 132, (10, 0): 148, (10, 3): 148}
_FUNCTIONS: list[Callable] = []  # as written
_LOADED: dict[Callable, Any] = {}  # as written -> as Triton knows it
_INTERPRETER = threading.Lock()
_COLLECTED: contextvars.ContextVar = contextvars.ContextVar("collected", default=None)


class Launch(NamedTuple):
    """How often and how wide a kernel runs."""

    programs: int
    num_warps: int
    num_stages: int


class Call(NamedTuple):
    """A launch that was asked for, with shapes in the place of arrays."""

    function: Callable
    arrays: list[jax.ShapeDtypeStruct]
    outputs: list[jax.ShapeDtypeStruct]
    mode: Any
    how: Launch


class Compiled(NamedTuple):
    """What is known of a kernel compiled ahead of time; sizes in bytes, for one thread or block."""

    registers: int
    local: int
    shared: int
    tensor: int  # columns of tensor memory, on Blackwell
    ptx: str


def kernel(function: Callable) -> Callable:
    """Declare a function as written in Triton; called by a kernel, or launched by this module."""
    # Annotations of such a function are for Triton; a checker around it would hide its globals.
    function = inspect.unwrap(function)
    _FUNCTIONS.append(function)
    return function


def why_not(device: Device, *dtypes: Any) -> str | None:
    """Why this device cannot run Triton kernels on arrays of these dtypes; None when it can."""
    names = {np.dtype(dtype).name for dtype in dtypes}
    if unknown := sorted(names - set(_DTYPES)):
        return f"takes {', '.join(_DTYPES)} and no {unknown[0]}"
    if settings.interpret():
        return _why_not_interpreted(names)
    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            return f"needs {package.replace('_', '-')}, which is not installed"
    if device.compute_capability is None:
        return f"needs an NVIDIA GPU and the device is {device.kind!r}"
    if device.compute_capability < _OLDEST:
        have = ".".join(map(str, device.compute_capability))
        return f"needs compute capability 8.0 or higher and the device has {have}"
    return None


def _why_not_interpreted(dtypes: set[str]) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed"
    if "bfloat16" in dtypes:
        return "has no bfloat16 in Triton's interpreter, whose matmuls take its bits for integers"
    if "triton" in sys.modules and not _triton().knobs.runtime.interpret:
        return "cannot be interpreted: Triton was loaded before without TRITON_INTERPRET=1"
    return None


def multiprocessors(device: Device) -> int:
    """How many multiprocessors a device has; few in the interpreter, which has one program run."""
    if settings.interpret():
        return 3
    for here in jax.local_devices():
        if here.device_kind == device.kind and (count := getattr(here, "core_count", None)):
            return int(count)
    return _MULTIPROCESSORS.get(device.compute_capability or (9, 0), 84)


def launch(
    function: Callable,
    arrays: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    mode: Any,
    how: Launch,
    aliases: dict[int, int] | None = None,
) -> list[jax.Array]:
    """The outputs of a kernel; `aliases`: inputs that become an output, where they lie."""
    if (calls := _COLLECTED.get()) is not None:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        calls.append(Call(function, shapes, list(outputs), mode, how))
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]
    if settings.interpret():
        results = _interpreted(function, arrays, outputs, mode, how, aliases or {})
    else:
        results = _called(function, arrays, outputs, mode, how, aliases or {})
    # Triton knows nothing of shard_map: say over which mesh axes the results differ.
    axes = frozenset().union(*map(varying_axes, arrays))
    if axes:
        results = [jax.lax.pcast(x, tuple(axes), to="varying") for x in results]
    return list(results)


def after(x: jax.Array, earlier: jax.Array) -> jax.Array:
    """`x`; in the interpreter not before `earlier` is there.

    The interpreter runs one kernel at a time, and a CPU whose threads all wait for it stands still.
    """
    if not settings.interpret() or _COLLECTED.get() is not None:
        return x
    some = jnp.nan_to_num(earlier.reshape(-1)[0].astype(x.dtype))
    return x + jnp.minimum(jnp.abs(some), 0)  # plus 0, which XLA cannot know


def _called(
    function: Any, arrays: Any, outputs: Any, mode: Any, how: Launch, aliases: dict[int, int]
) -> list[jax.Array]:
    capability = device_of(arrays).compute_capability
    function = _loaded(function)
    return _jax_triton().triton_call(
        *arrays,
        kernel=function,
        out_shape=list(outputs),
        grid=(how.programs,),
        name=function.fn.__name__,
        compute_capability=capability and capability[0] * 10 + capability[1],
        num_warps=how.num_warps,
        num_stages=how.num_stages,
        input_output_aliases=aliases,
        mode=mode,
    )


def _interpreted(
    function: Any, arrays: Any, outputs: Any, mode: Any, how: Launch, aliases: dict[int, int]
) -> list:
    loaded = _loaded(function)  # here, where it is known that Triton is to interpret

    def run(*arrays: Any) -> list[np.ndarray]:
        inputs = [np.array(x) for x in arrays]
        results = [_forgotten(x) for x in outputs]
        for i, j in aliases.items():
            results[j] = inputs[i]
        pointers = map(_Pointer, [*inputs, *results])
        # Infinities are part of the algorithms; the interpreter keeps its state in globals.
        with _INTERPRETER, np.errstate(all="ignore"):
            loaded[(how.programs,)](*pointers, mode=mode)
        return results

    return jax.pure_callback(run, list(outputs), *arrays)


def _forgotten(x: jax.ShapeDtypeStruct) -> np.ndarray:
    """An output before it is written, such that what is forgotten shows."""
    kind = np.dtype(x.dtype)
    return np.full(x.shape, np.iinfo(kind).min if kind.kind == "i" else np.nan, kind)


class _Pointer:
    """A NumPy array in the form in which the interpreter takes arguments: as a tensor of torch."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype.name
        self.untyped_storage = self.cpu = lambda: self
        self.storage_offset = self.size = self.stride = lambda: None
        self.new_empty = lambda size, device: self
        self.set_ = self.copy_ = lambda *arguments: None

    def data_ptr(self) -> int:
        return self.array.ctypes.data


@contextlib.contextmanager
def collected() -> Iterator[list[Call]]:
    """Note launches instead of making them: what they would compute is zeros."""
    calls: list[Call] = []
    token = _COLLECTED.set(calls)
    try:
        yield calls
    finally:
        _COLLECTED.reset(token)


def ast_source(call: Call) -> tuple[Any, dict[str, int]]:
    """What Triton compiles for a launch, and with which options."""
    from triton.compiler import ASTSource  # type: ignore[import-not-found]

    function = _loaded(call.function)
    types = [f"*{_NAMES[np.dtype(x.dtype).name]}" for x in (*call.arrays, *call.outputs)]
    signature = dict(zip(function.arg_names, [*types, "constexpr"], strict=True))
    source = ASTSource(
        function,
        signature,
        constexprs={"mode": call.mode},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(types))},
    )
    return source, {"num_warps": call.how.num_warps, "num_stages": call.how.num_stages}


def compile_ahead(call: Call, capability: int) -> Compiled:
    """A kernel compiled for a compute capability such as 90, on any machine."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]

    source, options = ast_source(call)
    compiled = _triton().compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, local = _resources(compiled.asm["cubin"])
    tensor = compiled.metadata.tmem_size or 0
    return Compiled(registers, local, compiled.metadata.shared, tensor, compiled.asm["ptx"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the local memory it spills to, as the binary states them."""
    import re
    import subprocess
    import tempfile

    tool = _triton().knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    find = lambda name: int(re.findall(rf"{name}:(\d+)", text)[-1])
    return find("REG"), find("STACK") + find("LOCAL")


@functools.cache
def _triton() -> Any:
    if settings.interpret() and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    module = importlib.import_module("triton")
    if settings.interpret():
        _mend_interpreter()
    return module


def _mend_interpreter() -> None:
    """Let a number of one element, as which the interpreter holds scalars, be an index.

    NumPy 2.4 no longer makes an int of an array with an axis.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = mended


@functools.cache
def _jax_triton() -> Any:
    kept = os.environ.get("TRITON_CACHE_DIR")
    module = importlib.import_module("jax_triton")  # which empties this variable
    if kept is not None:
        os.environ["TRITON_CACHE_DIR"] = kept
    return module


def _loaded(function: Callable) -> Any:
    """The function as Triton knows it, and with it all that it may call."""
    if not inspect.isfunction(function):
        return function  # read from a module that is loaded already
    if function not in _LOADED:
        triton = _triton()
        _LOADED.update({f: triton.jit(f) for f in _FUNCTIONS if f not in _LOADED})
        for module in {sys.modules[f.__module__] for f in _FUNCTIONS}:
            names = vars(module)
            names["tl"] = importlib.import_module("triton.language")
            for name, value in list(names.items()):
                if inspect.isfunction(value) and value in _LOADED:
                    names[name] = _LOADED[value]
    return _LOADED[function]


def matmul_precision(dtype: Any) -> str:
    """How a kernel multiplies: float32 exactly, unless the user of JAX has asked for less."""
    asked = getattr(jax.config, "jax_default_matmul_precision", None)
    exact = dtype != jnp.float32 or asked in (None, "highest", "float32")
    return "ieee" if exact else "tf32"
