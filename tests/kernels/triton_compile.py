"""Compiles the kernels of flash attention ahead of time; a process of its own, without interpreter.

python triton_compile.py CAPABILITY CALL...    one line of JSON for each candidate of each call
"""

import json
import sys

import jax
import jax.numpy as jnp

from ejkernel.kernels.common import triton_bridge
from ejkernel.kernels.common.dropout import Dropout
from ejkernel.kernels.flash_attention import triton_gpu
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.ops.platform import Device
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


def launches(inputs, spec, params, backward):
    def run(inputs):
        if not backward:
            return triton_gpu.forward(inputs, spec, params)
        b, t, n, _ = inputs.query.shape
        outputs = Outputs(
            jnp.zeros((b, t, n, inputs.value.shape[3]), inputs.query.dtype), jnp.zeros((b, n, t))
        )
        return triton_gpu.backward(inputs, outputs, outputs, spec, params)

    with triton_bridge.collected() as calls:
        jax.eval_shape(run, inputs)
    return calls


def main(capability, names):
    device = Device("gpu", "a GPU", divmod(capability, 10), "a GPU|absent")
    for name in names:
        inputs, spec = call(name)
        for direction in ("forward", "backward"):
            chosen = getattr(triton_gpu.IMPLEMENTATION, direction)
            for params in chosen.choices(inputs, spec, device):
                for launch in launches(inputs, spec, params, direction == "backward"):
                    compiled = triton_bridge.compile_ahead(launch, capability)
                    print(
                        json.dumps(
                            {
                                "call": name,
                                "kernel": getattr(launch.function, "__name__", "?"),
                                "params": params.to_dict(),
                                "registers": compiled.registers,
                                "local": compiled.local,
                                "shared": compiled.shared,
                                "tensor": compiled.tensor,
                                "wgmma": "wgmma" in compiled.ptx,
                            }
                        ),
                        flush=True,
                    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
