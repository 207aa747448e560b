"""Fixtures of the kernels' tests."""

import jax.numpy as jnp
import pytest
from kernels.triton_testing import H200

from ejkernel import settings
from ejkernel.kernels.common.triton import bridge


@pytest.fixture
def interpreter():
    """Kernels run in Triton's interpreter, on NumPy arrays."""
    with settings.override(interpret=True):
        if reason := bridge.why_not(H200, jnp.float32):
            pytest.skip(f"triton {reason}")
        yield
