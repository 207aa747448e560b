"""Compiles the Triton kernel of `examples/own_kernel.py` at full size, on any machine.

python example_kernel_compile.py CAPABILITY    for each configuration: bytes spilled, and shared
"""

import sys
from pathlib import Path

import jax.numpy as jnp

from ejkernel.kernels.common.triton import bridge

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from own_kernel import SIZES, TRITON, in_triton

if __name__ == "__main__":
    tokens, width = SIZES["full"]
    with bridge.recorded_launches() as launches:
        x = jnp.zeros((tokens, width))
        for cfg in TRITON:
            in_triton(x, x, x[0], cfg)
    for launch in launches:
        kernel = bridge.compile_ahead(launch, int(sys.argv[1]))
        print(kernel.local_memory, kernel.shared_memory)
