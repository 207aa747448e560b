"""The only module that uses jax-triton: launches Triton kernels, interprets them, compiles them.

A file of kernels never imports Triton. It declares its device functions with `@triton_jit` and a
global `tl: Any = None`. The first launch imports Triton, assigns `triton.language` to `tl` and
replaces every declared function by its `triton.JITFunction`. So such a file can be imported on a
machine without Triton, and `TRITON_INTERPRET` is set before Triton is imported, which is when
Triton reads it. Such a file has `from __future__ import annotations`: Triton evaluates annotations
like `tl.constexpr`, which Python cannot while `tl` is None.

A kernel takes pointers to its inputs, pointers to its outputs, and one compile-time constant named
`static`, a `StaticArguments`. Parameters are annotated with the types of `device_types`.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel import settings
from ejkernel.kernels.common.triton.device_types import StaticArguments
from ejkernel.ops.meshes import vary_as
from ejkernel.ops.platform import Device

_MIN_COMPUTE_CAPABILITY = (8, 0)
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_EIGHT_BITS = {"int8": "i8", "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
_TRITON_DTYPES = {**_DTYPES, **_EIGHT_BITS, "int32": "i32", "bool": "i1"}
_INTERPRETED_MULTIPROCESSORS = 3  # few: the interpreter runs one program after the other
_UNKNOWN_GPU_MULTIPROCESSORS = 84
_DECLARED: list[Callable] = []  # Python functions
_JIT_FUNCTIONS: dict[Callable, Any] = {}  # Python function -> triton.JITFunction
_INTERPRETER_LOCK = threading.Lock()
_RECORDING: contextvars.ContextVar = contextvars.ContextVar("recorded_launches", default=None)


class LaunchConfig(NamedTuple):
    """Grid size and compiler options of a launch."""

    programs: int
    num_warps: int
    num_stages: int


class RecordedLaunch(NamedTuple):
    """The arguments of a launch that was recorded and not made; arrays as shapes."""

    function: Callable
    arrays: list[jax.ShapeDtypeStruct]
    outputs: list[jax.ShapeDtypeStruct]
    static: StaticArguments
    config: LaunchConfig


class CompiledKernel(NamedTuple):
    """Resources of a kernel that was compiled ahead of time."""

    registers: int  # of a thread
    local_memory: int  # bytes of a thread: register spills
    shared_memory: int  # bytes of a block
    tensor_memory: int  # columns, on Blackwell
    ptx: str


def triton_jit(function: Callable) -> Callable:
    """Declare a Triton device function: a kernel, or a function that kernels call."""
    # A run-time type checker around the function would hide its globals from Triton.
    function = inspect.unwrap(function)
    _DECLARED.append(function)
    return function


def why_not(device: Device, *dtypes: DTypeLike) -> str | None:
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
    if device.compute_capability < _MIN_COMPUTE_CAPABILITY:
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


def grid_multiprocessors(device: Device) -> int:
    """The number of multiprocessors that a persistent grid is sized for."""
    if settings.interpret():
        return _INTERPRETED_MULTIPROCESSORS
    return device.multiprocessors or _UNKNOWN_GPU_MULTIPROCESSORS


def padded_size(size: int) -> int:
    """The smallest axis of a tile that holds `size`: a power of two, 16 for `tl.dot` at least."""
    return max(16, 1 << (size - 1).bit_length())


def launch(
    function: Callable,
    arrays: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    static: StaticArguments,
    config: LaunchConfig,
    device: Device,
    aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """The outputs of a kernel; `aliases`: inputs that are updated in place as an output."""
    if (recording := _RECORDING.get()) is not None:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        recording.append(RecordedLaunch(function, shapes, list(outputs), static, config))
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]
    request = _LaunchRequest(function, arrays, outputs, static, config, dict(aliases or {}))
    results = _interpret(request) if settings.interpret() else _call_triton(request, device)
    # Triton knows nothing of shard_map: say over which mesh axes the results differ.
    return [vary_as(x, *arrays) for x in results]


def interpreted_after(x: jax.Array, earlier: jax.Array) -> jax.Array:
    """`x`; in the interpreter, an array that depends on `earlier` too.

    The interpreter runs one kernel at a time. A kernel that is started while another one runs would
    hold a thread of the CPU while it waits, and with all threads waiting nothing moves.
    """
    if not settings.interpret() or _RECORDING.get() is not None:
        return x
    first = jnp.nan_to_num(earlier.reshape(-1)[0].astype(x.dtype))
    return x + jnp.minimum(jnp.abs(first), 0)  # plus 0, which XLA cannot know


class _LaunchRequest(NamedTuple):
    """The arguments of `launch`."""

    function: Callable
    arrays: Sequence[jax.Array]
    outputs: Sequence[jax.ShapeDtypeStruct]
    static: StaticArguments
    config: LaunchConfig
    aliases: dict[int, int]


def _call_triton(request: _LaunchRequest, device: Device) -> list[jax.Array]:
    capability = device.compute_capability
    function = _jit_function(request.function)
    return _jax_triton().triton_call(
        *request.arrays,
        kernel=function,
        out_shape=list(request.outputs),
        grid=(request.config.programs,),
        name=function.fn.__name__,
        compute_capability=capability and capability[0] * 10 + capability[1],
        num_warps=request.config.num_warps,
        num_stages=request.config.num_stages,
        input_output_aliases=request.aliases,
        static=request.static,
    )


def _interpret(request: _LaunchRequest) -> list[jax.Array]:
    function = _jit_function(request.function)  # imports Triton outside of the callback

    def run(*arrays: jax.Array | np.ndarray) -> list[np.ndarray]:
        inputs = [np.array(x) for x in arrays]
        results = [_uninitialized(x) for x in request.outputs]
        for i, j in request.aliases.items():
            results[j] = inputs[i]
        pointers = map(_InterpreterPointer, [*inputs, *results])
        # Infinities are part of the algorithms; the interpreter keeps its state in globals.
        with _INTERPRETER_LOCK, np.errstate(all="ignore"):
            function[(request.config.programs,)](*pointers, static=request.static)
        return results

    return jax.pure_callback(run, list(request.outputs), *request.arrays)


def _uninitialized(x: jax.ShapeDtypeStruct) -> np.ndarray:
    """An output filled with NaN or the smallest integer, so that elements not written are seen."""
    dtype = np.dtype(x.dtype)
    return np.full(x.shape, np.iinfo(dtype).min if dtype.kind == "i" else np.nan, dtype)


class _InterpreterPointer:
    """A NumPy array with the methods of a torch tensor that the interpreter calls."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype.name
        self.untyped_storage = self.cpu = lambda: self
        self.storage_offset = self.size = self.stride = lambda: None
        self.new_empty = lambda size, device: self
        self.set_ = self.copy_ = lambda *arguments: None

    def data_ptr(self) -> int:
        return self.array.ctypes.data


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[RecordedLaunch]]:
    """Record launches instead of making them; their outputs are zeros."""
    launches: list[RecordedLaunch] = []
    token = _RECORDING.set(launches)
    try:
        yield launches
    finally:
        _RECORDING.reset(token)


def ast_source(launch: RecordedLaunch) -> tuple[Any, dict[str, int]]:
    """The source that Triton compiles for a launch, and the compiler options."""
    from triton.compiler import ASTSource  # type: ignore[import-not-found]

    function = _jit_function(launch.function)
    arrays = (*launch.arrays, *launch.outputs)
    types = [f"*{_TRITON_DTYPES[np.dtype(x.dtype).name]}" for x in arrays]
    signature = dict(zip(function.arg_names, [*types, "constexpr"], strict=True))
    source = ASTSource(
        function,
        signature,
        constexprs={"static": launch.static},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(types))},
    )
    return source, {"num_warps": launch.config.num_warps, "num_stages": launch.config.num_stages}


def compile_ahead(launch: RecordedLaunch, capability: int) -> CompiledKernel:
    """The kernel of a launch, compiled for a compute capability such as 90, on any machine."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]

    source, options = ast_source(launch)
    compiled = _triton().compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, local_memory = _resources(compiled.asm["cubin"])
    return CompiledKernel(
        registers=registers,
        local_memory=local_memory,
        shared_memory=compiled.metadata.shared,
        tensor_memory=compiled.metadata.tmem_size or 0,
        ptx=compiled.asm["ptx"],
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of local memory that it spills to."""
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
        _patch_interpreter()
    return module


def _patch_interpreter() -> None:
    """Let a scalar of the interpreter be an index: it is an array of shape [1].

    NumPy 2.4 no longer converts an array with an axis to an int.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


@functools.cache
def _jax_triton() -> Any:
    cache_dir = os.environ.get("TRITON_CACHE_DIR")
    module = importlib.import_module("jax_triton")  # which clears this variable
    if cache_dir is not None:
        os.environ["TRITON_CACHE_DIR"] = cache_dir
    if "torch" not in sys.modules:
        _initialize_without_torch()
    return module


def _initialize_without_torch() -> None:
    """Let Triton's native code look up its types now, when it finds no torch.

    At the first kernel it imports torch if that is installed, which takes seconds, and uses it only
    to recognize tensors sooner. Tensors of a program that imports torch later are recognized by
    their attributes.
    """
    library: Any = importlib.import_module("triton._C.libtriton")
    specialize = getattr(library, "native_specialize_impl", None)
    if specialize is None:
        return
    # What else it imports: torch is hidden for microseconds only.
    importlib.import_module("triton.tools.tensor_descriptor")
    importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        # A version that takes other arguments initializes itself later.
        with contextlib.suppress(TypeError):
            specialize(None, 2, False, False, False)
    finally:
        del sys.modules["torch"]


def _jit_function(function: Callable) -> Any:
    """The `triton.JITFunction` of a declared function; loads Triton for all declared functions."""
    if not inspect.isfunction(function):
        return function  # it was taken from a module after Triton was loaded
    if function not in _JIT_FUNCTIONS:
        triton = _triton()
        _JIT_FUNCTIONS.update({f: triton.jit(f) for f in _DECLARED if f not in _JIT_FUNCTIONS})
        for module in {sys.modules[f.__module__] for f in _DECLARED}:
            names = vars(module)
            names["tl"] = importlib.import_module("triton.language")
            for name, value in list(names.items()):
                if inspect.isfunction(value) and value in _JIT_FUNCTIONS:
                    names[name] = _JIT_FUNCTIONS[value]
    return _JIT_FUNCTIONS[function]


def matmul_precision(dtype: DTypeLike) -> str:
    """`input_precision` of `tl.dot`: exact float32, unless JAX is configured for less."""
    configured = getattr(jax.config, "jax_default_matmul_precision", None)
    exact = dtype != jnp.float32 or configured in (None, "highest", "float32")
    return "ieee" if exact else "tf32"
