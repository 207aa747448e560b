"""Compiles the Triton kernels of grouped matmul ahead of time; a process without interpreter.

python grouped_matmul_compile.py [--guess] CAPABILITY CALL...    one line of JSON for each kernel
"""

import jax
import jax.numpy as jnp
from kernels.triton_programs import collected, compile_calls

from ejkernel.kernels.grouped_matmul import triton
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Outputs, Spec, TransposedInputs

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


def launches(inputs, spec, params, device, backward):
    def run(inputs):
        outputs, _ = triton.run_forward(inputs, spec, params, device)
        if backward:
            d_outputs = Outputs(jnp.zeros_like(outputs.out))
            triton.run_backward(inputs, (), d_outputs, spec, params, device)

    return collected(run, inputs)


def all_launches(name, device, guess):
    inputs, spec = call(name)
    choices = triton.IMPLEMENTATION.forward.choices(inputs, spec, device)
    for params in choices[:1] if guess else choices:
        yield from launches(inputs, spec, params, device, True)


def facts(launch):
    static = launch.static
    blocks = (static.block_m, static.block_n, static.block_k)
    return {"blocks": blocks, "launch": launch.config}


if __name__ == "__main__":
    compile_calls(all_launches, facts)
