"""Random calls compile on default blocks: `benchmarks/tpu_shapes.py` compiles many more of them."""

import pytest

from tpu.ahead_of_time import GENERATIONS, compiled, kernels_in, needs_libtpu
from tpu.random_shapes import KERNELS, random_call

pytestmark = [needs_libtpu, pytest.mark.tpu]


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_random_call_fits(kernel, number):
    call, generation = random_call(kernel, number), list(GENERATIONS)[number % len(GENERATIONS)]
    assert kernels_in(compiled(generation, call.function, call.arguments)) >= 1
    assert kernels_in(compiled(generation, call.gradient, call.arguments)) >= 1
