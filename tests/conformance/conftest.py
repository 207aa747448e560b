"""Kernels for TPUs are interpreted where there is none."""

import jax
import pytest

from ejkernel import settings


@pytest.fixture(autouse=True)
def _interpreted(request):
    case = getattr(request.node, "callspec", None) and request.node.callspec.params.get("case")
    if case is not None and case.source.backend == "tpu" and jax.default_backend() != "tpu":
        with settings.override(interpret=True):
            yield
    else:
        yield
