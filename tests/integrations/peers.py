"""The libraries that the tests of this folder compare with."""

import importlib
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

_NEWEST_THAT_ALL_SUPPORT = (0, 11, 0)  # of JAX; flax.nnx 0.12.8 does not run with 0.11.1


def need(module: str) -> ModuleType:
    """A module of another library; without it the caller is skipped, with the reason."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        pytest.skip(f"needs {package}: make test-integrations", allow_module_level=True)
    except (AttributeError, ImportError) as error:
        if jax.__version_info__ <= _NEWEST_THAT_ALL_SUPPORT:
            raise
        pytest.skip(
            f"{module} does not run with JAX {jax.__version__}: {error}", allow_module_level=True
        )


def same(ours, theirs, tolerance=3e-5):
    """Two trees have the same shapes, dtypes and values."""
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (jnp.shape(one), jnp.result_type(one)) == (jnp.shape(other), jnp.result_type(other))
        np.testing.assert_allclose(
            np.asarray(one, np.float64),
            np.asarray(other, np.float64),
            rtol=tolerance,
            atol=tolerance,
        )
