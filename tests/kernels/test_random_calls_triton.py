"""Random calls in Triton's interpreter are what the reference defines."""

import pytest
from conformance.random_cases import cases, check
from kernels.triton_testing import needs_triton

from ejkernel import settings
from ejkernel.kernels import OPS
from ejkernel.ops import kernel_registry

ON_TRITON = [
    name for name in OPS if any(x.platform == "triton" for x in kernel_registry.op(name).sources)
]


@needs_triton
@pytest.mark.parametrize("index", cases(ON_TRITON, 3, 3, 30))
def test_a_call(index):
    with settings.override(interpret=True):
        check(index, "triton", "float32", "float16")
