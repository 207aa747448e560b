"""Configurations are frozen, validated, compared by value, and survive JSON."""

import dataclasses

import pytest

from ejkernel.ops.config import BwdParams, Config, FwdParams
from ejkernel.ops.platform import Backend, Platform


@dataclasses.dataclass(frozen=True)
class TiledConfig(Config):
    fwd_params: FwdParams | dict = dataclasses.field(
        default_factory=lambda: FwdParams(q_blocksize=128)
    )
    bwd_params: BwdParams | dict = dataclasses.field(default_factory=BwdParams)


@dataclasses.dataclass(frozen=True)
class ForwardConfig(Config):
    fwd_params: FwdParams | dict = dataclasses.field(default_factory=FwdParams)


@dataclasses.dataclass(frozen=True)
class FlatConfig(Config):
    block: int = 64


SOME = TiledConfig(
    FwdParams(q_blocksize=128, kv_blocksize=256, num_warps=4),
    BwdParams(q_blocksize=64),
    platform="triton",
    backend="gpu",
)


def names(kind):
    return [field.name for field in dataclasses.fields(kind)]


def test_parameters_have_the_documented_fields():
    common = ["blocksize_m", "blocksize_k", "blocksize_n", "q_blocksize", "kv_blocksize"]
    launch = ["num_warps", "num_stages"]
    keys = ["blocksize_heads", "blocksize_keys", "num_key_splits"]
    tpu = ["blocksize_heads", "resident_queries", "mxu_width"]
    assert names(FwdParams) == [*common, *keys, *launch, "mxu_width"]
    assert names(BwdParams) == [*common, *launch, "deterministic", *tpu]
    assert set(dataclasses.asdict(FwdParams()).values()) == {None}


@pytest.mark.parametrize("kind", [FwdParams, BwdParams])
@pytest.mark.parametrize("value", [0, -1, True])
def test_a_parameter_is_positive(kind, value):
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: num_warps must be a positive int"):
        kind(num_warps=value)


def test_whether_gradients_are_deterministic_is_a_bool(as_a_user_calls):
    assert BwdParams.from_json(BwdParams(deterministic=False).to_json()) == BwdParams(
        deterministic=False
    )
    with pytest.raises(
        ValueError, match=r"^BwdParams: deterministic must be a bool or None, got 1"
    ):
        BwdParams(deterministic=1)


@pytest.mark.parametrize("kind", [FwdParams, BwdParams])
@pytest.mark.parametrize("value", [1.5, "64"])
def test_a_parameter_is_an_int(kind, value):
    # Past the shape and type checks of __init__, which only tests have.
    params = object.__new__(kind)
    object.__setattr__(params, "num_warps", value)
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: num_warps must be a positive int"):
        params.__post_init__()


@pytest.mark.parametrize("platform", ["auto", *Platform])
@pytest.mark.parametrize("backend", list(Backend))
def test_every_platform_is_constructible_anywhere(platform, backend):
    config = FlatConfig(platform=platform, backend=backend)
    assert config.platform == platform
    assert config.backend == ("any" if platform == "xla" else backend)
    assert {type(config.platform), type(config.backend)} == {str}


def test_an_unknown_platform_or_backend_is_named():
    with pytest.raises(ValueError, match=r"^FlatConfig: platform .* auto, triton, .* got 'cute'"):
        FlatConfig(platform="cute")
    with pytest.raises(ValueError, match=r"^FlatConfig: backend .* gpu, tpu, cpu, any, got 'mps'"):
        FlatConfig(backend="mps")


def test_parameters_may_be_given_as_dictionaries():
    config = TiledConfig(fwd_params={"q_blocksize": 32}, bwd_params={"num_stages": 2})
    assert config == TiledConfig(FwdParams(q_blocksize=32), BwdParams(num_stages=2))


def test_parameters_of_the_wrong_class_are_refused():
    with pytest.raises(ValueError, match=r"^TiledConfig: fwd_params must be a FwdParams, got Bwd"):
        TiledConfig(fwd_params=BwdParams())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("config", [SOME, TiledConfig(), ForwardConfig(), FlatConfig(8)])
def test_json_gives_back_the_same_configuration(config):
    assert type(config).from_json(config.to_json()) == config
    assert type(config).from_dict(config.to_dict()) == config


def test_a_written_configuration_shows_only_the_parameters_that_are_set():
    assert SOME.to_dict() == {
        "platform": "triton",
        "backend": "gpu",
        "fwd_params": {"q_blocksize": 128, "kv_blocksize": 256, "num_warps": 4},
        "bwd_params": {"q_blocksize": 64},
    }


def test_unknown_fields_are_named():
    with pytest.raises(ValueError, match=r"^FlatConfig: unknown field tile, depth; it has .*block"):
        FlatConfig.from_dict({"tile": 1, "block": 2, "depth": 3})
    with pytest.raises(ValueError, match=r"^FwdParams: unknown field tile"):
        TiledConfig(fwd_params={"tile": 1})
    with pytest.raises(ValueError, match=r"^FlatConfig: the JSON must be an object"):
        FlatConfig.from_json("[1]")


def test_configurations_hash_by_value():
    same = TiledConfig.from_json(SOME.to_json())
    assert len({SOME, same}) == 1
    # (128, 1) and (12, 81) must not be taken for each other.
    one = FwdParams(q_blocksize=128, kv_blocksize=1)
    other = FwdParams(q_blocksize=12, kv_blocksize=81)
    assert hash(one) != hash(other)


def test_each_direction_gets_its_own_parameters_else_the_configuration():
    assert SOME.params("forward") == FwdParams(q_blocksize=128, kv_blocksize=256, num_warps=4)
    assert SOME.params("backward") == BwdParams(q_blocksize=64)
    forward_only = ForwardConfig()
    assert forward_only.params("forward") == FwdParams()
    assert forward_only.params("backward") is forward_only
    flat = FlatConfig()
    assert flat.params("forward") is flat


def test_tpu_configurations_stored_before_keep_their_meaning():
    """`blocksize_m` was the width of the matrix unit forward and the resident queries backward."""
    stored = {
        "platform": "pallas",
        "backend": "tpu",
        "fwd_params": {"q_blocksize": 512, "blocksize_heads": 2, "blocksize_m": 256},
        "bwd_params": {"blocksize_m": 1024, "blocksize_k": 256, "blocksize_n": 4},
    }
    config = TiledConfig.from_dict(stored)
    assert config.fwd_params == FwdParams(q_blocksize=512, blocksize_heads=2, mxu_width=256)
    assert config.bwd_params == BwdParams(resident_queries=1024, mxu_width=256, blocksize_heads=4)
    assert TiledConfig.from_dict(config.to_dict()) == config
    on_gpu = TiledConfig.from_dict(stored | {"platform": "triton", "backend": "gpu"})
    assert on_gpu.bwd_params == BwdParams(blocksize_m=1024, blocksize_k=256, blocksize_n=4)
