"""Lowers a decoding step of linear attention for an H200 on a machine without one.

Prints the number of Triton kernels, of arrays that they update in place, and of donated arrays
that become results.
"""

import jax
import jax.numpy as jnp
from kernels.triton_programs import kernels, lowered

from ejkernel.modules import gla_attention


def step(query, key, value, gate, state):
    return gla_attention(
        query, key, value, gate, initial_state=state, return_state=True, platform="triton"
    )


if __name__ == "__main__":
    token = jax.ShapeDtypeStruct((4, 1, 8, 64), jnp.bfloat16)
    state = jax.ShapeDtypeStruct((4, 8, 64, 64), jnp.float32)
    for donate in ((), (4,)):
        text = lowered(step, token, token, token, token, state, donate=donate)
        in_place = text.count("#stablehlo.output_operand_alias")
        print(kernels(text), in_place, text.count("tf.aliasing_output"))
