"""Random calls compile on default blocks: `benchmarks/tpu_shapes.py` compiles many more of them."""

import pytest

from ejkernel.errors import UnsupportedError
from tpu.ahead_of_time import GENERATIONS, needs_libtpu
from tpu.random_shapes import KERNELS, fits, random_call

pytestmark = [needs_libtpu, pytest.mark.tpu]

# Of those whose code others share; a few of the others.
CALLS = {"grouped_matmul": 20, "ragged_page_attention_v3": 20, "gla_attention": 20}
CALLS |= {"flash_attention": 10}


@pytest.mark.parametrize(
    ("kernel", "number"),
    [(kernel, number) for kernel in KERNELS for number in range(CALLS.get(kernel, 1))],
)
def test_a_random_call_fits(kernel, number):
    generation = list(GENERATIONS)[number % len(GENERATIONS)]
    try:
        fitting = fits(generation, random_call(kernel, number))
    except UnsupportedError as refusal:
        # The smallest memory cannot hold every state; whoever refuses says so.
        fitting = generation == "v4" and "has no room in VMEM" in str(refusal)
    assert fitting
