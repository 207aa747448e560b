"""Compiles the kernels of linear attention ahead of time, in a process without interpreter.

python gla_compile.py [--guess] CAPABILITY CALL...    one line of JSON for each kernel
"""

import jax
import jax.numpy as jnp
from kernels.triton_programs import collected, compile_calls

from ejkernel.kernels.gla_attention import triton
from ejkernel.kernels.gla_attention.inputs import Inputs, Outputs, Spec


def call(name):
    """`channel_128_128_2048`, `half-head_64_256_2000`, ...: the gate, head dims and length."""
    what, *sizes = name.split("_")
    half = what.startswith("half")
    dtype = "float32" if what == "exact" else "float16" if half else "bfloat16"
    h, v, t = map(int, sizes)
    array = lambda *sizes, dtype=dtype: jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))
    inputs = Inputs(array(2, t, 4, h), array(2, t, 4, h), array(2, t, 4, v))
    gates = {
        "plain": {},
        "gamma": {"g_gamma": array(2, 4, dtype="float32")},
        "head": {"gate": array(2, t, 4, 1)},
        "channel": {"gate": array(2, t, 4, h)},
        "wide": {"gate": array(2, t, 4, h, dtype="float32")},
        "exact": {"gate": array(2, t, 4, h)},
    }
    return inputs._replace(**gates[what.removeprefix("half-")]), Spec(softmax_scale=0.1)


def launches(inputs, spec, params, device, backward):
    def run(inputs):
        if not backward:
            return triton.run_forward(inputs, spec, params, device)
        batch, tokens, heads, rows = inputs.query.shape
        columns = inputs.value.shape[3]
        d_outputs = Outputs(
            jnp.zeros((batch, tokens, heads, columns), inputs.query.dtype),
            jnp.zeros((batch, 1, heads, rows, columns)),
        )
        return triton.run_backward(inputs, triton.Residuals(), d_outputs, spec, params, device)

    return collected(run, inputs)


def all_launches(name, device, guess):
    inputs, spec = call(name)
    for direction in ("forward", "backward"):
        choices = getattr(triton.IMPLEMENTATION, direction).choices(inputs, spec, device)
        for params in choices[:1] if guess else choices:
            yield from launches(inputs, spec, params, device, direction == "backward")


if __name__ == "__main__":
    compile_calls(all_launches, lambda launch: {"launch": launch.config})
