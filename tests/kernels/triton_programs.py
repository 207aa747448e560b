"""For scripts that compile or lower Triton kernels on a machine without a GPU."""

import json
import sys

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from ejkernel.kernels.common.triton import bridge
from ejkernel.ops.platform import Device

# Kind and number of multiprocessors.
_GPUS = {80: ("NVIDIA A100", 108), 90: ("NVIDIA H200", 132), 100: ("NVIDIA B200", 148)}
_H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def compile_calls(launches, facts):
    """One line of JSON for each kernel that `launches(call, device, guess)` gives.

    The command line is `[--guess] CAPABILITY CALL...`. `facts(launch)` are added to the resources
    that the compiler reports.
    """
    capability, *calls = [argument for argument in sys.argv[1:] if argument != "--guess"]
    capability = int(capability)
    kind, multiprocessors = _GPUS.get(capability, ("a GPU", None))
    device = Device("gpu", kind, divmod(capability, 10), f"{kind}|absent", multiprocessors)
    for call in calls:
        for launch in launches(call, device, "--guess" in sys.argv):
            found = bridge.compile_ahead(launch, capability)
            line = {
                "call": call,
                "kernel": getattr(launch.function, "__name__", "?"),
                "registers": found.registers,
                "local": found.local_memory,
                "shared": found.shared_memory,
                "tensor": found.tensor_memory,
                "wgmma": "wgmma" in found.ptx,
                "wide": ".v4.b32" in found.ptx,  # loads or stores of 16 bytes
            }
            print(json.dumps(line | facts(launch)), flush=True)


def collected(run, *arguments):
    """The launches of a call that is traced and not run."""
    with bridge.recorded_launches() as launches:
        jax.eval_shape(run, *arguments)
    return launches


def lowered(function, *arguments, donate=()):
    """The text of a program for an H200."""
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=_H200)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernels(text):
    """How many Triton kernels a program calls."""
    return text.count("custom_call @triton_kernel_call")
