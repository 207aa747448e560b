"""What differs between the versions of Pallas Mosaic GPU, and whether it can be used at all."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ejkernel.kernels.common.refs import Ref
from ejkernel.ops.meshes import vary_as

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


def kernel(
    body: Callable[..., None],
    *,
    out_type: jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...],
    scratch_types: Mapping[str, object],
    blocks: int,
    warpgroups: int,
    interpreted: bool,
) -> Callable[..., Any]:
    """`plgpu.kernel` with explicit layouts, fast `exp2` and no automatic barriers.

    The axes are called "block" (thread blocks of the grid) and "warpgroup". JAX allocates the
    scratch memory in the alphabetical order of its names.
    """
    # Only JAX 0.12 tells the interpreter by argument.
    options = {}
    if interpreted:
        options["interpret"] = plgpu.InterpretGPUParams(detect_races=detect_races)
    call = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=True,
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        **options,
    )
    # It says nothing of the mesh axes over which its results differ.
    return lambda *operands: jax.tree.map(lambda x: vary_as(x, *operands), call(*operands))


def load(ref: Ref, layout: Any) -> jax.Array:
    """An array from global or shared memory, straight to the registers of a layout."""
    index = inspect.signature(plgpu.load).parameters.get("idx")
    if index is not None and index.default is inspect.Parameter.empty:  # before JAX 0.11
        return plgpu.load(ref, ..., layout=layout, optimized=False)
    return plgpu.load(ref, layout=layout, optimized=False)
