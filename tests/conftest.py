"""Every test sees eight CPU devices and a cache directory of its own."""

import itertools
import os

import jax
import jaxtyping
import pytest

# Compiling is most of what the tests do, and what they compile runs once: it need not be fast.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_gpu_autotune_level=0"
)
jax.config.update("jax_num_cpu_devices", 8)

_tests_run = itertools.count(1)


@pytest.fixture(autouse=True)
def _settings_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    if jax.default_backend() == "gpu":  # where calls are tuned, which compiles every candidate
        monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")


@pytest.fixture(autouse=True)
def _few_programs():
    """Forget compiled programs in time: each maps memory, and a process may have 65530 mappings."""
    yield
    if next(_tests_run) % 25 == 0:
        jax.clear_caches()


@pytest.fixture
def as_a_user_calls():
    """Without the shape checks that only tests have, so that our own messages are seen."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
