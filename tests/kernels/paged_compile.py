"""Compiles the Triton kernels over pages ahead of time; a process of its own, no interpreter.

python paged_compile.py CAPABILITY CALL...    one line of JSON for each candidate of each call
"""

import json
import sys

import jax
import jax.numpy as jnp

from ejkernel.kernels.common import triton_bridge
from ejkernel.kernels.ragged_page_attention_v3 import triton_gpu
from ejkernel.kernels.ragged_page_attention_v3.inputs import CombinedInputs, Inputs, Spec
from ejkernel.ops.platform import Device


def call(name):
    """`decode_128_64_bfloat16_plain`: what, head dim, page size, cache, features."""
    what, dim, size, cache, features = name.split("_", 4)
    cache = cache.replace("e4m3", "float8_e4m3fn").replace("e5m2", "float8_e5m2")
    dim, size = int(dim), int(size)
    dtype = jnp.float32 if cache == "float32" else jnp.bfloat16
    shape = lambda *sizes, dtype=jnp.int32: jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))
    sequences, tokens = 64, {"decode": 64, "mixed": 4096}[what]
    pages = shape(4096, size, 8, dim, dtype=cache)
    inputs = Inputs(
        shape(1, tokens, 32, dim, dtype=dtype),
        pages,
        pages,
        shape(1, sequences),
        shape(1, sequences),
        shape(1, sequences),
        shape(1, sequences, 8192 // size),
    )
    spec = Spec(softmax_scale=0.1)
    scale = shape(8, dtype=jnp.float32)
    if jnp.dtype(cache).itemsize == 1:
        inputs = inputs._replace(k_scale=scale, v_scale=scale)
    if features == "all":
        spec = Spec(softmax_scale=0.1, logits_soft_cap=30.0, sliding_window=1000)
        sinks = shape(32, 1, dtype=jnp.float32)
        inputs = inputs._replace(k_scale=scale, v_scale=scale, sinks=sinks)
    elif features == "combined":
        pages = shape(4096, size, 8, 2, dim, dtype=cache)
        inputs = CombinedInputs(inputs.query, pages, None, *inputs[3:])
    return inputs, spec


def launches(inputs, spec, params):
    with triton_bridge.collected() as calls:
        jax.eval_shape(lambda inputs: triton_gpu.forward(inputs, spec, params), inputs)
    return calls


def main(capability, names):
    kind = {80: "NVIDIA A100", 90: "NVIDIA H200", 100: "NVIDIA B200"}.get(capability, "a GPU")
    device = Device("gpu", kind, divmod(capability, 10), "a GPU|absent")
    triton_gpu.device_of = lambda leaves: device
    for name in names:
        inputs, spec = call(name)
        for params in triton_gpu.IMPLEMENTATION.forward.choices(inputs, spec, device):
            for launch in launches(inputs, spec, params):
                compiled = triton_bridge.compile_ahead(launch, capability)
                facts = {
                    "call": name,
                    "kernel": getattr(launch.function, "__name__", "?"),
                    "block_k": launch.mode.block_k,
                    "rows": launch.mode.rows,
                    "warps": launch.how.num_warps,
                    "stages": launch.how.num_stages,
                    "programs": launch.how.programs,
                    "registers": compiled.registers,
                    "local": compiled.local,
                    "shared": compiled.shared,
                    "tensor": compiled.tensor,
                    "wgmma": "wgmma" in compiled.ptx,
                }
                print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
