"""Compiles the Triton kernels of mean pooling ahead of time; a process without interpreter.

python mean_pooling_compile.py [--guess] CAPABILITY CALL...    one line of JSON for each kernel
"""

import jax
import jax.numpy as jnp
from kernels.triton_programs import collected, compile_calls

from ejkernel.kernels.mean_pooling import triton
from ejkernel.kernels.mean_pooling.inputs import Inputs, Outputs, Spec

DTYPES = {"exact": jnp.float32, "odd": jnp.float16}


def call(name):
    """`padded_8_4096_4096`, `mask_2_500_1000`, `packed_4096_1000`: what, and the sizes of x."""
    what, *sizes = name.split("_")
    sizes = tuple(map(int, sizes))
    x = jax.ShapeDtypeStruct(sizes, DTYPES.get(what, jnp.bfloat16))
    if len(sizes) == 2:
        return Inputs(x, cu_seqlens=jax.ShapeDtypeStruct((9,), jnp.int32))
    mask = jax.ShapeDtypeStruct(sizes[:2], jnp.bool_) if what == "mask" else None
    return Inputs(x, attention_mask=mask)


def launches(inputs, params, device, backward):
    def run(inputs):
        if not backward:
            return triton.run_forward(inputs, Spec(), params, device)
        sequences = 1 if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
        shape = (*inputs.x.shape[:-2], sequences, inputs.x.shape[-1])
        d_outputs = Outputs(jnp.zeros(shape, inputs.x.dtype))
        return triton.run_backward(inputs, (), d_outputs, Spec(), params, device)

    return collected(run, inputs)


def all_launches(name, device, guess):
    inputs = call(name)
    for direction in ("forward", "backward"):
        choices = getattr(triton.IMPLEMENTATION, direction).choices(inputs, Spec(), device)
        for params in choices[:1] if guess else choices:
            yield from launches(inputs, params, device, direction == "backward")


if __name__ == "__main__":
    compile_calls(all_launches, lambda launch: {"launch": launch.config})
