"""Every test sees eight CPU devices."""

import itertools
import os
from pathlib import Path

import jax
import jaxtyping
import pytest

# Most of the processor time of the tests is compilation, and each program runs only a few times:
# compile quickly. On CPU the older emitters take a third of the time; JAX 0.11 removed them.
_flags = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_gpu_autotune_level=0",
]
if jax.__version_info__ < (0, 11):
    _flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_flags])
jax.config.update("jax_num_cpu_devices", 8)
pytest_plugins = ["evidence", "tiers"]

_tests_run = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_programs():
    """Forget compiled programs in time: each maps memory, and a process may have 65530 mappings."""
    yield
    if next(_tests_run) % 10 == 0 and _mappings() > 30_000:
        jax.clear_caches()


def _mappings() -> int:
    """How many memory mappings this process has; 0 where the system does not say."""
    listing = Path("/proc/self/maps")
    return listing.read_bytes().count(b"\n") if listing.exists() else 0


@pytest.fixture
def as_a_user_calls():
    """Without the shape checks that only tests have, so that our own messages are seen."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


_compiled_seconds: list[float] = []


def _listen(event: str, seconds: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled_seconds.append(seconds)


jax.monitoring.register_event_duration_secs_listener(_listen)


@pytest.fixture
def compilations():
    """Seconds of each program that XLA compiled since the test began, or since it was cleared."""
    _compiled_seconds.clear()
    return _compiled_seconds
