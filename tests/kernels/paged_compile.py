"""Compiles the paged Triton kernels ahead of time, in a process without interpreter.

python paged_compile.py [--guess] CAPABILITY CALL...    one line of JSON for each kernel
"""

import jax
import jax.numpy as jnp
from kernels.triton_programs import collected, compile_calls

from ejkernel.kernels.ragged_page_attention_v3 import triton as paged_triton
from ejkernel.kernels.ragged_page_attention_v3.inputs import CombinedInputs, Inputs, Spec
from ejkernel.kernels.ragged_page_attention_v3_update import inputs as update_inputs
from ejkernel.kernels.ragged_page_attention_v3_update import triton as update_triton


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
    elif features == "update":
        new = shape(1, tokens, 8, dim, dtype=dtype)
        inputs = update_inputs.Inputs(**inputs._asdict(), key=new, value=new)
        spec = update_inputs.Spec(softmax_scale=0.1)
    return inputs, spec


def _module(inputs):
    return update_triton if isinstance(inputs, update_inputs.Inputs) else paged_triton


def launches(inputs, spec, params, device):
    forward = _module(inputs).IMPLEMENTATION.forward
    return collected(lambda inputs: forward(inputs, spec, params, device=device), inputs)


def all_launches(name, device, guess):
    inputs, spec = call(name)
    choices = _module(inputs).IMPLEMENTATION.forward.choices(inputs, spec, device)
    for params in choices[:1] if guess else choices:
        yield from launches(inputs, spec, params, device)


def facts(launch):
    rows = getattr(launch.static, "max_rows", 0)
    return {"rows": rows, "launch": launch.config}


if __name__ == "__main__":
    compile_calls(all_launches, facts)
