"""Random calls compile on default blocks: `benchmarks/tpu_shapes.py` compiles many more of them."""

import pytest

from ejkernel.errors import UnsupportedError
from tpu.ahead_of_time import GENERATIONS, needs_libtpu
from tpu.random_shapes import KERNELS, fits, random_call

pytestmark = [needs_libtpu, pytest.mark.tpu]

# So many are compiled each time, most of them of kernels that others share; the rest is slow.
CALLS = {"grouped_matmul": 20, "ragged_page_attention_v3": 10, "gla_attention": 10}
CALLS |= {"flash_attention": 10}


def calls():
    for kernel in KERNELS:
        for number in range(20):
            marks = () if number < CALLS.get(kernel, 1) else pytest.mark.slow
            yield pytest.param(kernel, number, marks=marks)


@pytest.mark.parametrize(("kernel", "number"), list(calls()))
def test_a_random_call_fits(kernel, number):
    generation = list(GENERATIONS)[number % len(GENERATIONS)]
    try:
        fitting = fits(generation, random_call(kernel, number))
    except UnsupportedError as refusal:
        # The smallest memory cannot hold every state; whoever refuses says so.
        fitting = generation == "v4" and "has no room in VMEM" in str(refusal)
    assert fitting
