"""Every test and every example of a docstring has a cache directory of its own."""

import importlib.util

import jax
import pytest

# Modules for libraries that are not installed have no examples to run.
_NEEDS = {"ejkernel/integrations/equinox.py": "equinox"}
collect_ignore = [path for path, name in _NEEDS.items() if not importlib.util.find_spec(name)]


@pytest.fixture(autouse=True)
def _settings_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    if jax.default_backend() == "gpu":  # where calls are tuned, which compiles every candidate
        monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
