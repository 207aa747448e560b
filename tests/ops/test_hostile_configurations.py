"""What a file of configurations holds, whatever it is, never makes a call fail."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.kernels import Scale, ScaleConfig

import ejkernel
from ejkernel.cli.random_calls.run import choices_of, comparison
from ejkernel.errors import CacheWarning
from ejkernel.kernels import OPS
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, PersistentCache
from ejkernel.ops.config import FwdParams
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.platform import device_of

pytestmark = pytest.mark.usefixtures("as_a_user_calls")

NOTHING_OF_OURS = {
    "a number": 5,
    "NaN": float("nan"),
    "true": True,
    "text": "__import__('os').abort()",
    "a list": [1, 2],
    "deep": {"fwd_params": {"q_blocksize": {"a": [1]}}},
    "unknown fields": {"a" * 10_000: 1, "__class__": 2},
    "no platform": {"platform": ["xla"]},
    "another platform": {"platform": "cude"},
}
SIZES = [0, -1, 1.5, float("nan"), True, "64", [64], 2**31, 10**30]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "op.json"


def executor(path):
    """An executor that nothing is known to, except for what the file holds."""
    disk = PersistentCache("op", path)
    return Executor(ConfigSelectorChain(ConfigCache(), persistent=disk))


def invocation(op):
    call = comparison(choices_of(7, OPS.index(op))).call
    assert call.op.name == op
    device = device_of(jax.tree.leaves(call.inputs))
    return Invocation(call.op, call.inputs, call.spec, device)


def sizes_of(config):
    """Configurations of this class as a file holds them, each with one size that is none."""
    for field in dataclasses.fields(config):
        if field.name in ("platform", "backend", "bwd_params"):
            continue
        if field.name == "fwd_params":
            yield from (
                {"platform": "xla", "fwd_params": {inner.name: size}}
                for inner in dataclasses.fields(FwdParams)
                for size in SIZES
            )
        elif isinstance(field.default, int | None) and not isinstance(field.default, bool):
            sizes = SIZES[1:] if field.default == 0 else SIZES
            yield from ({"platform": "xla", field.name: size} for size in sizes)
        if field.name in ("num_warps", "num_stages"):
            yield {"platform": "xla", field.name: 2**20}


@pytest.mark.parametrize("op", OPS)
def test_an_operation_is_chosen_for_as_if_there_were_no_file(path, op):
    inv = invocation(op)
    expected = executor(path).chooser.choose(inv)
    for stored in (*NOTHING_OF_OURS.values(), *sizes_of(inv.op.config)):
        PersistentCache("op", path).put(inv.key, stored)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert executor(path).chooser.choose(inv) == expected, stored
        [warning] = told
        assert warning.category is CacheWarning
        text = str(warning.message)
        assert text.startswith(f"{op}: a stored configuration is not usable: "), stored
        assert len(text) < 400


@pytest.mark.parametrize("stored", NOTHING_OF_OURS.values(), ids=NOTHING_OF_OURS.keys())
def test_a_call_works_with_one_warning(path, stored):
    x = jnp.ones((2, 8, 4))
    run = executor(path)
    PersistentCache("op", path).put(run.invocation(ejkernel.mean_pooling, x).key, stored)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            np.testing.assert_allclose(run(ejkernel.mean_pooling, x), np.ones((2, 4)), rtol=1e-6)
    assert [warning.category for warning in told] == [CacheWarning]


def test_null_is_no_configuration(path):
    inv = invocation("mean_pooling")
    PersistentCache("op", path).put(inv.key, None)
    assert executor(path).chooser.choose(inv) == executor(path / "no").chooser.choose(inv)


@pytest.mark.parametrize("stored", [5, "text", [1], {"unknown": 1}, {"platform": "xla"}])
def test_a_kernel_of_the_user_gets_no_other_class_either(path, stored):
    kernel, x = Scale(), jnp.ones(3)
    run = executor(path)
    PersistentCache("op", path).put(run.invocation(kernel, x).key, stored)
    with pytest.warns(CacheWarning, match=r"^scale: a stored configuration is not usable: "):
        assert run.choose_config(kernel, x).params == ScaleConfig()


def test_a_configuration_of_another_operation_is_refused():
    cache = ConfigCache()
    inv = invocation("mean_pooling")
    cache.put(inv.key, ejkernel.modules.FlashAttentionConfig(platform="xla"))
    with pytest.warns(CacheWarning, match="must be a MeanPoolingConfig, got FlashAttentionConfig"):
        ConfigSelectorChain(cache).choose(inv)
