"""Random calls of every operation are what the reference defines: `ejkernel check --random`."""

import jax
import pytest
from conformance.random_cases import cases, check

from ejkernel import settings
from ejkernel.kernels import OPS
from ejkernel.ops import kernel_registry

ON_TPU = [name for name in OPS if any(x.backend == "tpu" for x in kernel_registry.op(name).sources)]


@pytest.mark.parametrize("index", cases(["mean_pooling", "grouped_matmul"], 3, 3, 3))
def test_a_quick_call_on_xla(index):
    check(index, "xla")


@pytest.mark.parametrize("index", cases(OPS, 0, 70, 300))
def test_a_call_on_xla(index):
    check(index, "xla")


@pytest.mark.tpu
@pytest.mark.parametrize("index", cases(ON_TPU, 3, 3, 60))
def test_a_call_on_tpu(index):
    """Interpreted where there is no TPU."""
    with settings.override(interpret=jax.default_backend() != "tpu"):
        check(index, "pallas", "float32", "bfloat16")
