"""Random calls compile on default blocks: `benchmarks/tpu_shapes.py` compiles many more of them."""

import pytest
from evidence import proves

from ejkernel.errors import UnsupportedError
from ejkernel.ops import kernel_registry
from tpu.ahead_of_time import GENERATIONS, needs_libtpu
from tpu.random_shapes import KERNELS, fits, random_call

pytestmark = [needs_libtpu, pytest.mark.tpu]

# Compiled each time, of the kernels that others share one for each generation; the rest is slow.
SHARED = ("flash_attention", "gla_attention", "grouped_matmul", "ragged_page_attention_v3")


def calls():
    for kernel in KERNELS:
        for number in range(20):
            quick = number < (len(GENERATIONS) if kernel in SHARED else 1)
            marks = () if quick else pytest.mark.slow
            yield pytest.param(kernel, number, marks=marks)


@pytest.mark.parametrize(("kernel", "number"), list(calls()))
def test_a_random_call_fits(kernel, number):
    generation = list(GENERATIONS)[number % len(GENERATIONS)]
    call = random_call(kernel, number)
    source = next(x for x in kernel_registry.op(kernel).sources if x.backend == "tpu")
    directions = ("forward", "backward") if call.differentiable else ("forward",)
    proves(kernel, source, *directions, compiled_for=generation)
    try:
        assert fits(generation, call)
    except UnsupportedError as refusal:
        if generation != "v4" or "has no room in VMEM" not in str(refusal):
            raise
        pytest.skip(f"the smallest VMEM cannot hold every state: {refusal}")
