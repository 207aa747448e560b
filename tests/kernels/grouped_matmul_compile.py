"""Compiles the Triton kernels of grouped matmul ahead of time; a process without interpreter.

python grouped_matmul_compile.py [--guess] CAPABILITY CALL...    one line of JSON for each kernel
"""

import json
import sys

import jax
import jax.numpy as jnp

from ejkernel.kernels.common import triton_bridge
from ejkernel.kernels.grouped_matmul import triton_gpu
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Outputs, Spec, TransposedInputs
from ejkernel.ops.platform import Device

DTYPES = {"half": "bfloat16", "exact": "float32"}


def call(name):
    """`half_sizes_64_512_1408`, `exact_ids_...`: how, rows a weight, k and n, maybe transposed."""
    how, where, rows, k, n, *transposed = name.split("_")
    rows, k, n = map(int, (rows, k, n))
    dtype, weights = jnp.dtype(DTYPES[how]), 8
    shape = jax.ShapeDtypeStruct
    kind = TransposedInputs if transposed else Inputs
    inputs = kind(
        shape((rows * weights, k), dtype),
        shape((weights, n, k) if transposed else (weights, k, n), dtype),
    )
    if where == "ids":
        inputs = inputs._replace(
            group_ids=shape((rows * weights,), jnp.int32),
            existing_out=shape((rows * weights, n), dtype),
        )
    else:
        inputs = inputs._replace(group_sizes=shape((weights,), jnp.int32))
    return inputs, Spec(transpose_rhs=bool(transposed))


def launches(inputs, spec, params, backward):
    def run(inputs):
        outputs, _ = triton_gpu.forward(inputs, spec, params)
        if backward:
            triton_gpu.backward(inputs, (), Outputs(jnp.zeros_like(outputs.out)), spec, params)

    with triton_bridge.collected() as calls:
        jax.eval_shape(run, inputs)
    return calls


def main(capability, names, guess):
    device = Device("gpu", "a GPU", divmod(capability, 10), "a GPU|absent")
    for name in names:
        inputs, spec = call(name)
        choices = triton_gpu.IMPLEMENTATION.forward.choices(inputs, spec, device)
        for params in choices[:1] if guess else choices:
            for launch in launches(inputs, spec, params, True):
                compiled = triton_bridge.compile_ahead(launch, capability)
                blocks = launch.mode.block_m, launch.mode.block_n, launch.mode.block_k
                line = {
                    "call": name,
                    "kernel": getattr(launch.function, "__name__", "?"),
                    "blocks": blocks,
                    "launch": launch.how[1:],
                    "registers": compiled.registers,
                    "local": compiled.local,
                    "shared": compiled.shared,
                    "tensor": compiled.tensor,
                    "wgmma": "wgmma" in compiled.ptx,
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--guess"]
    main(int(given[0]), given[1:], "--guess" in sys.argv)
