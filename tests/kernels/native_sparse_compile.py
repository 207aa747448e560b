"""Compiles the kernels of native sparse attention ahead of time, in a process without interpreter.

python native_sparse_compile.py [--guess] CAPABILITY CALL...    one line of JSON for each kernel
"""

import jax
import jax.numpy as jnp
from kernels.triton_programs import collected, compile_calls

from ejkernel.kernels.native_sparse_attention import triton
from ejkernel.kernels.native_sparse_attention.inputs import (
    Branch,
    Inputs,
    Outputs,
    Residuals,
    SelectionInputs,
    Spec,
)
from ejkernel.kernels.native_sparse_attention.triton import selection

DTYPES = {"half": "bfloat16", "exact": "float32"}


def shape(*sizes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def call(name):
    """`half_16_128_64`: the dtype, the group, the head dim and the block size; maybe `packed`."""
    how, group, head_dim, block_size, *packed = name.split("_")
    group, h, block_size = map(int, (group, head_dim, block_size))
    b, t, k = (1, 4000, 2) if packed else (2, 4096, 2)
    array = lambda *sizes: shape(b, t, *sizes, dtype=DTYPES[how])
    inputs = Inputs(
        array(k * group, h),
        array(k, h),
        array(k, h),
        shape(b, t, k, 16, dtype="int32"),
        g_slc=array(k * group) if packed else None,
        cu_seqlens=shape(9, dtype="int32") if packed else None,
    )
    return inputs, Spec(softmax_scale=0.1, block_size=block_size)


def launches(inputs, spec, params, device, backward):
    def run(inputs):
        if not backward:
            return triton.run_forward(inputs, spec, params, device)
        b, t, n, _ = inputs.query.shape
        out = jnp.zeros((b, t, n, inputs.value.shape[3]), inputs.query.dtype)
        residuals = Residuals(Branch(out, jnp.zeros((b, n, t))), None, None)
        return triton.run_backward(inputs, residuals, Outputs(out), spec, params, device)

    return collected(run, inputs)


def all_launches(name, device, guess):
    inputs, spec = call(name)
    for direction in ("forward", "backward"):
        choices = getattr(triton.IMPLEMENTATION, direction).choices(inputs, spec, device)
        for params in choices[:1] if guess else choices:
            yield from launches(inputs, spec, params, device, direction == "backward")
    b, t, n, h = inputs.query.shape
    k = inputs.key.shape[2]
    query = jax.ShapeDtypeStruct((b, t, k, n // k, h), inputs.query.dtype)
    choice = SelectionInputs(query, inputs.key, shape(16, dtype="int32"), inputs.cu_seqlens)
    if selection.why_not(choice, spec, device) is None:
        yield from collected(lambda x: selection.run(x, spec, None, device), choice)


def facts(launch):
    static = launch.static
    return {"tile": (static.tokens, static.rows), "launch": launch.config}


if __name__ == "__main__":
    compile_calls(all_launches, facts)
