"""Every test sees eight CPU devices and a cache directory of its own."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
