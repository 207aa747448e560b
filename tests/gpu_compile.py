"""Compile for an H200 on a machine without one: what the assembler says of every kernel.

XLA's CUDA plugin takes the description of a device in place of a device, and Pallas assembles its
kernels while XLA compiles. Needed: the wheels jax-cuda13-pjrt and jax-cuda13-plugin of JAX's own
version (no driver, no other library) and a ptxas; CONTRIBUTING.md says how to get them.

What the assembler reports goes straight to the standard output of the process, so that compilations
run in a process of their own; many kernels share one.
"""

import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 12 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  device_memory_size: 150754820096
  clock_rate_ghz: 1.98
}
"""

_MARK = "--- compiled "


@dataclasses.dataclass(frozen=True)
class Report:
    """What ptxas said of the kernels of one program."""

    text: str

    @property
    def spilled(self) -> int:
        """Bytes that did not fit into registers."""
        return sum(map(int, re.findall(r"(\d+) bytes (?:stack frame|spill \w+)", self.text)))

    @property
    def kernels(self) -> int:
        return len(re.findall(r"Compiling entry function '\w*mosaic_gpu_kernel'", self.text))

    @property
    def complaints(self) -> list[str]:
        """Lines about matmuls that cannot overlap, and other losses that it foresees."""
        return re.findall(r".*(?:Potential Performance Loss|[Ww]arning).*", self.text)


@functools.cache
def why_not() -> str | None:
    """What is missing for compiling here, or None."""
    if importlib.util.find_spec("jax_plugins") is None or not _plugin():
        return "jax-cuda13-pjrt and jax-cuda13-plugin are not installed"
    try:
        importlib.import_module("jax.experimental.mosaic.gpu")
    except ImportError as error:  # JAX 0.10 does not install absl-py, which it needs for this
        return f"Pallas for NVIDIA GPUs cannot be imported: {error}"
    if not _cuda_root():
        return "there is no ptxas: not on PATH, not in CUDA_ROOT, not from nvidia-cuda-nvcc"
    return None


def _plugin() -> bool:
    return importlib.util.find_spec("jax_plugins.xla_cuda13") is not None


def _cuda_root() -> Path | None:
    """A directory with bin/ptxas."""
    places = [os.environ.get("CUDA_ROOT"), "/usr/local/cuda"]
    if found := shutil.which("ptxas"):
        places.append(str(Path(found).resolve().parents[1]))
    if (spec := importlib.util.find_spec("nvidia")) and spec.submodule_search_locations:
        places += [
            f"{base}/{name}" for base in spec.submodule_search_locations for name in ("cu13",)
        ]
    roots = (Path(place) for place in places if place)
    return next((root for root in roots if (root / "bin" / "ptxas").exists()), None)


def compile_all(module: str, names: list[str], timeout: float = 600) -> dict[str, Report]:
    """Compile `module.PROGRAMS[name]()`, a function and its argument types, for each name.

    Args:
        module: importable from the root of the repository or from `tests`.
        names: keys of its `PROGRAMS`.
        timeout: seconds for all of them.

    Returns:
        What the assembler said of each.

    Raises:
        AssertionError: a program does not compile; the end of the error is its message.
    """
    done = in_a_process(__file__, module, *names, timeout=timeout, MOSAIC_GPU_DUMP_PTXAS="1")
    parts = done.stdout.split(_MARK)[1:]
    reports = {part.partition("\n")[0]: Report(part.partition("\n")[2]) for part in parts}
    missing = [name for name in names if name not in reports]
    assert not missing, f"{missing}: {done.stderr[-3000:]}"
    assert done.returncode == 0, done.stderr[-3000:]
    return reports


def in_a_process(
    program: str, *arguments: str, timeout: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A Python file run with these arguments, which finds the package and the tests."""
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, sys.path)]
    everything = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths), **environment}
    # Triton reads it once in a process: this one may interpret, the other compiles.
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, program, *arguments],
        env={**inherited, **everything},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def use_the_assembler() -> None:
    """Let Mosaic GPU find the assembler; to be called before anything is compiled."""
    # After the import of Mosaic GPU, which sets it to a guess.
    importlib.import_module("jax.experimental.mosaic.gpu")
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = os.environ["CUDA_ROOT"] = str(_cuda_root())


def devices(count: int) -> list:
    """So many H200 that are not present."""
    from jax.experimental import topologies

    described = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=H200, topology=f"1x1x{count}"
    )
    return described.devices


@functools.cache
def mesh():
    """A mesh of one H200 that is not present."""
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(devices(1)), ("device",))


def on_the_device(tree):
    """The shapes of a tree of arrays, on that device."""
    import jax

    sharding = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec())
    put = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(put, tree)


def _main(module: str, *names: str) -> None:
    import jax

    programs = importlib.import_module(module).PROGRAMS
    use_the_assembler()
    for name in names:
        function, *arguments = programs[name]()
        # The assembler's report comes first, from below Python; the mark must follow it.
        lowered = jax.jit(function).trace(*on_the_device(arguments)).lower()
        print(f"{_MARK}{name}", flush=True)
        lowered.compile()


if __name__ == "__main__":
    _main(*sys.argv[1:])
