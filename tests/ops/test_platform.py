"""The device of a call: its arrays', its mesh's, or the default one."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ejkernel.ops import platform
from ejkernel.ops.platform import (
    Backend,
    Device,
    Platform,
    device_fingerprint,
    device_of,
    get_device_platform,
)


def absent_mesh(kind="TPU v6 lite", platform="tpu", axis_type=AxisType.Explicit, num_cores=1):
    device = AbstractDevice(device_kind=kind, num_cores=num_cores, platform=platform)
    return AbstractMesh((1,), ("x",), (axis_type,), abstract_device=device)


def seen_while_tracing(mesh, sharded=True, constant=None):
    """The device that `device_of` reports inside jit, for an input on this mesh."""
    seen = []

    def record(x):
        seen.append(device_of([constant, x, None]))
        return x

    sharding = NamedSharding(mesh, PartitionSpec("x")) if sharded else None
    with jax.sharding.use_abstract_mesh(mesh):
        jax.jit(record).trace(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))
    return seen[0]


def test_a_gpu_of_an_unknown_name_is_described_by_the_caller():
    with platform.target_device("NVIDIA L40S", cores=142, compute_capability=(8, 9)):
        device = platform.target()
    assert device.multiprocessors == 142
    assert device.compute_capability == (8, 9)
    with platform.target_device("NVIDIA H200", cores=66):
        assert platform.target().multiprocessors == 66
        assert platform.target().compute_capability == (9, 0)
    with (
        pytest.raises(ValueError, match=r"cores= and .* are for GPUs, got the kind 'TPU v5e'"),
        platform.target_device("TPU v5e", cores=2),
    ):
        pass


def test_enums_are_their_names():
    assert [str(member) for member in Platform] == ["triton", "pallas", "cuda", "xla"]
    assert [str(member) for member in Backend] == ["gpu", "tpu", "cpu", "any"]


def test_concrete_arrays_decide(monkeypatch):
    elsewhere = Device("tpu", "TPU v6 lite", None, "TPU v6 lite|1")
    describe = platform.describe
    fourth = jax.devices()[3]
    monkeypatch.setattr(
        platform, "describe", lambda device: elsewhere if device == fourth else describe(device)
    )
    x = jax.device_put(jnp.ones(3), fourth)
    assert device_of([None, 1.0, x]) == elsewhere
    assert device_of([jnp.ones(3)]) != elsewhere
    assert device_of([]) != elsewhere
    with jax.default_device(fourth):
        assert device_of([]) == elsewhere
        assert jax.jit(lambda x: device_of([x]) == elsewhere)(1.0)


@pytest.mark.parametrize("axis_type", list(AxisType))
def test_under_a_trace_the_mesh_decides_though_its_machine_is_not_here(axis_type):
    expected = Device("tpu", "TPU v6 lite", None, "TPU v6 lite|absent")
    mesh = absent_mesh(axis_type=axis_type)
    assert seen_while_tracing(mesh) == expected
    # A constant of the program goes where the program goes.
    assert seen_while_tracing(mesh, constant=jnp.ones(3)) == expected
    assert seen_while_tracing(mesh, sharded=False, constant=jnp.ones(3)) == expected


def test_shapes_with_a_sharding_are_judged_like_traced_arrays():
    sharding = NamedSharding(absent_mesh(), PartitionSpec("x"))
    shape = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    assert device_of([shape]).kind == "TPU v6 lite"
    assert device_of([jax.ShapeDtypeStruct((8,), jnp.float32)]).fingerprint == device_fingerprint()


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA A100-SXM4-40GB", (8, 0)),
        ("NVIDIA GB200", (10, 0)),
        ("NVIDIA Quadro P400", None),
    ],
)
def test_the_compute_capability_of_an_absent_gpu_comes_from_its_name(kind, capability):
    device = seen_while_tracing(absent_mesh(kind, "cuda"))
    assert device[:4] == ("gpu", kind, capability, f"{kind}|absent")


@pytest.mark.parametrize(
    ("kind", "multiprocessors", "shared_memory"),
    [
        ("NVIDIA H200", 132, 232_448),
        ("NVIDIA H100 PCIe", 114, 232_448),
        ("NVIDIA H20", 78, 232_448),
        ("NVIDIA A100-SXM4-40GB", 108, 166_912),
        ("NVIDIA Quadro P400", None, None),
    ],
)
def test_the_sizes_of_an_absent_gpu_come_from_its_name(kind, multiprocessors, shared_memory):
    device = seen_while_tracing(absent_mesh(kind, "cuda", num_cores=None))
    assert device[4:] == (multiprocessors, shared_memory)


def test_the_cores_of_an_absent_gpu_may_be_given():
    assert seen_while_tracing(absent_mesh("NVIDIA H200", "cuda", num_cores=16))[4] == 16


def test_a_mesh_without_a_device_says_nothing():
    mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,))
    assert seen_while_tracing(mesh).fingerprint == device_fingerprint()


def test_the_mesh_of_this_machine_has_the_fingerprint_of_this_machine():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    seen = []

    def record(x):
        seen.append(device_of([x]))
        return x

    spec = PartitionSpec("x")
    jax.shard_map(record, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.ones(8))
    assert seen == [device_of([jnp.ones(3)])]


def test_a_gpu_is_described_by_name_driver_and_capability():
    gpu = types.SimpleNamespace(
        platform="gpu",
        device_kind="NVIDIA H200",
        compute_capability="9.0",
        client=types.SimpleNamespace(platform_version="PJRT C API\ncuda 13000"),
    )
    described = platform.describe.__wrapped__(gpu)
    fingerprint = "NVIDIA H200|PJRT C API cuda 13000"
    assert described == Device("gpu", "NVIDIA H200", (9, 0), fingerprint, 132, 232_448)


def test_what_has_no_cuda_capability_has_none():
    amd = types.SimpleNamespace(
        platform="rocm",
        device_kind="AMD Instinct MI300X",
        compute_capability="gfx942",
        client=types.SimpleNamespace(platform_version="rocm 60200"),
    )
    described = platform.describe.__wrapped__(amd)
    assert (described.platform, described.compute_capability) == ("gpu", None)


def test_the_default_device_names_itself():
    device = jax.local_devices()[0]
    assert device_fingerprint() == f"{device.device_kind}|{device.client.platform_version}"
    assert get_device_platform() == "cpu"
    with jax.default_device("cpu"):
        assert get_device_platform() == "cpu"
