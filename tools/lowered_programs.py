"""Record the program of every implementation on every workload, and compare two records.

    python tools/lowered_programs.py record FOLDER [--only PART ...]
    python tools/lowered_programs.py compare BEFORE AFTER

A change that only moves or renames code leaves all programs equal: record before it, record after
it, compare. What is recorded of a pass, with the parameters of its heuristic:

    xla            the jaxpr
    pallas (TPU)   the jaxpr, with the jaxpr of each kernel, for v5e and v6e
    pallas (GPU)   the jaxpr, and the Mosaic module of each kernel, for an H200
    triton         the jaxpr around the kernels, and each kernel's Triton IR, for an H200 and an
                   A100; with --ptx also its PTX

Names of functions and variables, source positions and addresses are left out. NVIDIA kernels need
the packages of `make test-gpu`: PYTHONPATH=.venv/cuda JAX_PLATFORMS=cpu.
"""

import argparse
import difflib
import hashlib
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from conformance.cases import as_shapes, function_of, workloads_of  # noqa: E402

from ejkernel.cli.oracle import with_dtype  # noqa: E402
from ejkernel.kernels import OPS  # noqa: E402
from ejkernel.ops import default_executor, kernel_registry  # noqa: E402
from ejkernel.ops.implementation import Implementation, Source  # noqa: E402
from ejkernel.ops.platform import Device, device_of  # noqa: E402
from ejkernel.ops.workload import Workload  # noqa: E402

_DEVICES = {
    ("xla", "any"): ("cpu",),
    ("pallas", "tpu"): ("TPU v5 lite", "TPU v6 lite"),
    ("pallas", "gpu"): ("NVIDIA H200",),
    ("triton", "gpu"): ("NVIDIA H200", "NVIDIA A100"),
    ("cuda", "gpu"): ("NVIDIA H200",),
}
_CORES = {"NVIDIA H200": 132, "NVIDIA A100": 108}
_DIRECTIONS = ("forward", "backward")


def record(folder: Path, only: list[str], ptx: bool) -> None:
    """One file for each program; a call that is refused is recorded as its reason."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in OPS:
        for source in kernel_registry.op(name).sources:
            for workload in workloads_of(name).WORKLOADS:
                for kind in _DEVICES[source.platform.value, source.backend.value]:
                    label = f"{source.platform.value}_{source.backend.value}"
                    device = kind.replace(" ", "")
                    where = f"{name}-{label}-{workload.name}-{device}"
                    if only and not any(part in where for part in only):
                        continue
                    for direction, text in _programs(name, source, workload, kind, ptx):
                        (folder / f"{where}-{direction}.txt").write_text(text + "\n")
            print(name, source.platform.value, source.backend.value, flush=True)


def _programs(
    name: str, source: Source, workload: Workload, kind: str, ptx: bool
) -> Iterator[tuple[str, str]]:
    mesh = _mesh(kind)
    with jax.sharding.use_abstract_mesh(mesh):
        for direction in _DIRECTIONS:
            try:
                yield direction, _program(name, source, workload, direction, ptx)
            except Exception:
                yield direction, f"error: {traceback.format_exc(limit=-1)}"


def _mesh(kind: str) -> AbstractMesh:
    platform = {"c": "cpu", "T": "tpu", "N": "gpu"}[kind[0]]
    device = AbstractDevice(device_kind=kind, num_cores=_CORES.get(kind), platform=platform)
    return AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)


def _program(name: str, source: Source, workload: Workload, direction: Any, ptx: bool) -> str:
    build = lambda: default_executor().invocation(function_of(name), **workload.build())
    call = as_shapes(build)
    inputs, spec = call.inputs, call.spec
    if source.backend.value == "gpu" or "tune" in workload.tags:
        inputs = jax.eval_shape(lambda x: with_dtype(x, jnp.bfloat16), inputs)
    device = device_of(jax.tree.leaves(inputs))
    implementation = source.load()
    chosen = getattr(implementation, direction)
    if chosen is None:
        return f"no {direction}"
    if reason := chosen.refusal(inputs, spec, device):
        return f"refused: {reason}"
    params = chosen.guess(inputs, spec, device)
    if direction == "forward":
        run, arguments = _forward(implementation, spec, device, params), (inputs,)
    else:
        outputs, residuals = _forward_shapes(name, inputs, spec, device)
        arguments = (inputs, residuals, outputs)
        run = lambda *arguments: chosen(*arguments, spec, params, device=device)
    return "\n".join([f"params: {params}", *_texts(source, run, arguments, device, ptx)])


def _forward(
    implementation: Implementation, spec: Any, device: Device, params: Any
) -> Callable[..., Any]:
    return lambda inputs: implementation.run_with_residuals(inputs, spec, params, device=device)


def _forward_shapes(name: str, inputs: Any, spec: Any, device: Device) -> tuple[Any, Any]:
    """Shapes of what a forward pass of the op gives, by XLA, which supports every call."""
    sources = kernel_registry.op(name).sources
    xla = next(x for x in sources if x.platform.value == "xla").load()
    if xla.forward is None:
        raise ValueError("XLA has no forward pass")
    params = xla.forward.guess(inputs, spec, device)
    return jax.eval_shape(_forward(xla, spec, device, params), inputs)


def _texts(
    source: Source, run: Callable[..., Any], arguments: tuple, device: Device, ptx: bool
) -> Iterator[str]:
    if source.platform.value != "triton":
        yield from _jaxpr(run, arguments)
    if source.platform.value == "pallas" and source.backend.value == "gpu":
        yield from _mosaic_modules(run, arguments)
    if source.platform.value == "triton":
        yield from _triton_kernels(run, arguments, device, ptx)


def _jaxpr(run: Callable[..., Any], arguments: tuple) -> Iterator[str]:
    """A jaxpr, and the index maps of its kernels, which its text leaves out."""
    closed = jax.make_jaxpr(run)(*arguments)
    yield _without_names(str(closed))
    jaxprs = [closed.jaxpr]
    while jaxprs:
        for equation in jaxprs.pop().eqns:
            if mapping := equation.params.get("grid_mapping"):
                for block in mapping.block_mappings:
                    yield _without_names(str(block.index_map_jaxpr))
            for value in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                if hasattr(value, "eqns"):
                    jaxprs.append(getattr(value, "jaxpr", value))


def _mosaic_modules(run: Callable[..., Any], arguments: tuple) -> list[str]:
    """The kernels of a program as they are lowered, without source positions."""
    core = importlib.import_module("jax.experimental.mosaic.gpu").core
    lower, modules = core._mosaic_gpu_lowering_rule, []

    def noted(*given: Any, module: Any, **options: Any) -> Any:
        modules.append(_without_names(module.operation.get_asm(enable_debug_info=False)))
        return lower(*given, module=module, **options)

    core._mosaic_gpu_lowering_rule = noted
    try:
        jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
    finally:
        core._mosaic_gpu_lowering_rule = lower
    return modules


def _triton_kernels(
    run: Callable[..., Any], arguments: tuple, device: Device, ptx: bool
) -> Iterator[str]:
    bridge = _bridge()
    with bridge.recorded_launches() as launches:
        yield from _jaxpr(run, arguments)
    capability = device.compute_capability or (9, 0)
    for launch in launches:
        programs, warps, stages = launch.config
        yield f"launch: Launch(programs={programs}, num_warps={warps}, num_stages={stages})"
        yield f"mode: {_values(launch.static)}"
        yield f"arrays: {[(x.shape, str(x.dtype)) for x in (*launch.arrays, *launch.outputs)]}"
        yield _without_names(_triton_ir(launch, capability))
        if ptx:
            compiled = bridge.compile_ahead(launch, 10 * capability[0] + capability[1])
            yield _without_names(_ptx(compiled.ptx))


def _bridge() -> Any:
    return importlib.import_module("ejkernel.kernels.common.triton.bridge")


def _values(static: Any) -> list[Any]:
    """The values of a static argument without the names of its fields."""
    return [getattr(static, name) for name in getattr(static, "__dataclass_fields__", ())] or [
        static
    ]


def _triton_ir(launch: Any, capability: tuple[int, int]) -> str:
    """A kernel as Triton's compiler gets it."""
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget(
        "cuda", 10 * capability[0] + capability[1], 32
    )
    source, options = _bridge().ast_source(launch)
    backend = compiler.make_backend(target)
    parsed = backend.parse_options(options)
    context = triton._C.libtriton.ir.context()
    triton._C.libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target,
        parsed,
        backend.get_codegen_implementation(parsed),
        backend.get_module_map(),
        context,
    )
    return module.str_nodebug()


def _ptx(text: str) -> str:
    """PTX without its debug information."""
    kept = []
    for line in text.splitlines():
        if line.strip().startswith(".section"):
            break
        if not re.match(r"\s*(\.loc|\.file|//|\$L__(tmp|func))", line):
            kept.append(line.partition("//")[0].rstrip())
    return "\n".join(kept)


_NAMES = re.compile(
    r"(?<=[@%])[A-Za-z_][\w.]*|@\"[^\"]*\""  # symbols of MLIR
    r"|(?<=\bname=)[^\s\]]+|(?<=name_and_src_info=)[^\n]*?(?=\s+out_avals|\n|$)"
    r"|0x[0-9a-f]+|/\S+\.py:\d+(?::\d+)?|<function [^>]*>|<bound method [^>]*>"
    r"|(?:func_name|debug_info|kernel_name)=\S+"
)


def _without_names(text: str) -> str:
    """The text with names numbered in the order in which they appear."""
    numbers: dict[str, str] = {}
    if jaxprs := set(re.findall(r"\blet (\w+) = \{ lambda", text)):
        named = re.compile(r"\b(?:" + "|".join(sorted(jaxprs)) + r")\b")
        text = named.sub(lambda x: numbers.setdefault(x[0], f"jaxpr{len(numbers)}"), text)
    return _NAMES.sub(lambda found: numbers.setdefault(found[0], f"name{len(numbers)}"), text)


def _comparable(text: str) -> str:
    """The text without line breaks, whose places depend on names, and without names of fields."""
    first, _, rest = text.partition("\n")
    if first.startswith("refused: "):  # in whatever words
        return "refused"
    if first.startswith("params: "):
        values = re.findall(r"\w+=([^,()]+)", first)
        first = "params: " + ", ".join(sorted(x for x in values if x != "None"))
    rest = " ".join(rest.split()).replace("[ ", "[").replace(" ]", "]")
    return f"{first}\n{rest}"


def compare(before: Path, after: Path) -> int:
    """Print what differs; the number of programs that do."""
    names = [{path.name for path in folder.glob("*.txt")} for folder in (before, after)]
    different = 0
    for name in sorted(names[0] | names[1]):
        if name not in names[0] or name not in names[1]:
            print(f"{name}: only {'after' if name in names[1] else 'before'}")
            different += 1
            continue
        texts = [_comparable((folder / name).read_text()) for folder in (before, after)]
        if texts[0] != texts[1]:
            different += 1
            texts = [(folder / name).read_text() for folder in (before, after)]
            lines = difflib.unified_diff(
                texts[0].splitlines(), texts[1].splitlines(), n=0, lineterm=""
            )
            first = [line[:160] for line, _ in zip(lines, range(8), strict=False)][2:]
            print(f"{name}: differs", *first, sep="\n    ")
    kinds = {"refused": 0, "error": 0, "no ": 0, "params": 0}
    for name in names[1]:
        start = (after / name).read_text()
        for kind in kinds:
            kinds[kind] += start.startswith(kind)
    digest = hashlib.sha256()
    for name in sorted(names[1]):
        digest.update(name.encode() + (after / name).read_bytes())
    print(
        f"{len(names[1])} passes: {kinds['params']} programs, {kinds['refused']} refused, "
        f"{kinds['no ']} that do not exist, {kinds['error']} errors; {different} differ; "
        f"digest {digest.hexdigest()[:12]}"
    )
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--only", nargs="+", default=[], help="parts of the names to record")
    recording.add_argument("--ptx", action="store_true", help="compile Triton kernels")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        record(options.folder, options.only, options.ptx)
    else:
        sys.exit(compare(options.before, options.after) > 0)


if __name__ == "__main__":
    main()
