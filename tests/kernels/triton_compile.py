"""Compiles the kernels of flash attention ahead of time, in a process without interpreter.

python triton_compile.py [--guess] CAPABILITY CALL...    one line of JSON for each kernel
"""

import jax
import jax.numpy as jnp
from kernels.triton_programs import collected, compile_calls

from ejkernel.kernels.flash_attention import triton as flash_triton
from ejkernel.kernels.flash_attention.dropout import Dropout
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.types.rules import Band, Dense, Segments


def shape(*sizes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def call(name):
    """`causal_128_2048`, `everything_64_2000`, ...: what, the head dim, and the length."""
    what, *sizes = name.split("_")
    dtype = "float32" if what == "exact" else "bfloat16"
    h, t = map(int, sizes)
    inputs = Inputs(
        shape(2, t, 8, h, dtype=dtype),
        shape(2, t, 2, h, dtype=dtype),
        shape(2, t, 2, h, dtype=dtype),
    )
    spec = Spec(softmax_scale=0.1)
    causal = Band(None, 0)
    if what in ("causal", "exact"):
        return inputs._replace(mask=causal), spec
    if what == "full":
        return inputs, spec
    if what == "decode":
        return inputs._replace(query=shape(2, 1, 8, h), mask=Band(None, t - 1)), spec
    ids = shape(2, t, dtype="int32")
    if what == "packed":
        return inputs._replace(mask=causal & Segments(ids, ids)), spec
    sinks = shape(8, 1, dtype="float32")
    if what == "capped":
        spec = Spec(softmax_scale=0.1, logits_soft_cap=50.0)
        return inputs._replace(mask=Band(-1023, 0), sinks=sinks), spec
    assert what == "everything", what
    number = lambda *sizes: shape(*sizes, dtype="int32")
    inputs = inputs._replace(
        mask=causal & Segments(ids, ids) & Dense(shape(2, 1, t, t, dtype="bool")),
        bias=shape(1, 8, t, t),
        sinks=sinks,
        dropout=Dropout(number(), number(2), number(8)),
    )
    return inputs, Spec(softmax_scale=0.1, logits_soft_cap=30.0, dropout_prob=0.1)


def launches(inputs, spec, params, device, backward):
    def run(inputs):
        if not backward:
            return flash_triton.run_forward(inputs, spec, params, device)
        b, t, n, _ = inputs.query.shape
        outputs = Outputs(
            jnp.zeros((b, t, n, inputs.value.shape[3]), inputs.query.dtype), jnp.zeros((b, n, t))
        )
        return flash_triton.run_backward(inputs, outputs, outputs, spec, params, device)

    return collected(run, inputs)


def all_launches(name, device, guess):
    inputs, spec = call(name)
    for direction in ("forward", "backward"):
        choices = getattr(flash_triton.IMPLEMENTATION, direction).choices(inputs, spec, device)
        for params in choices[:1] if guess else choices:
            yield from launches(inputs, spec, params, device, direction == "backward")


if __name__ == "__main__":
    compile_calls(all_launches, lambda launch: {"launch": launch.config})
