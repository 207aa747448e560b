"""Compiles paged attention over a cache of more than 2**31 elements that has its heads first.

Prints for each kernel the types in which the stride of a head, 268,441,600 elements, is a constant:
the last of nine heads is farther away than 32 bits can count.
"""

import importlib
import re

import jax
import jax.numpy as jnp
from kernels.triton_programs import collected

from ejkernel.kernels.common.triton import bridge
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs
from ejkernel.kernels.ragged_page_attention_v3_update import inputs as update_inputs
from ejkernel.kernels.ragged_page_attention_v3_update import triton as update_triton
from ejkernel.ops.platform import Device

HEADS, PAGES, PAGE_SIZE, DIM = 9, 131_075, 16, 128
STRIDE = PAGES * PAGE_SIZE * DIM
H200 = Device("gpu", "NVIDIA H200", (9, 0), "NVIDIA H200|absent", 132)


def launches():
    """Those of one token for each of two sequences."""
    shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)
    numbers = lambda *sizes: shape(*sizes, dtype=jnp.int32)
    pages, new = shape(HEADS, PAGES, PAGE_SIZE, DIM), shape(1, 2, HEADS, DIM)
    sequences = (numbers(1, 2), numbers(1, 2), numbers(1, 2), numbers(1, 2, 64))
    inputs = Inputs(new, pages, pages, *sequences)
    inputs = update_inputs.Inputs(**inputs._asdict(), key=new, value=new)
    spec = update_inputs.Spec(softmax_scale=0.1, kv_layout="HNPD")
    forward = update_triton.IMPLEMENTATION.forward
    params = forward.heuristic(inputs, spec, H200)
    return collected(lambda inputs: forward(inputs, spec, params, device=H200), inputs)


if __name__ == "__main__":
    compiler = importlib.import_module("triton.backends.compiler")
    for launch in launches():
        source, options = bridge.ast_source(launch)
        target = compiler.GPUTarget("cuda", 90, 32)
        text = importlib.import_module("triton").compile(source, target=target, options=options)
        ttir = text.asm["ttir"]
        kinds = re.findall(rf"constant (?:dense<)?{STRIDE}>? : (?:tensor<[\dx]+)?(i\d+)", ttir)
        print(launch.function.__name__, *sorted(set(kinds)))
