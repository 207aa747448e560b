"""Exported programs: symbolic sizes, and programs for a backend that is not present."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.errors import UnsupportedError
from ejkernel.modules import flash_attention, gla_attention, grouped_matmul, mean_pooling
from ejkernel.ops import target_device

# Annotations say int, which a symbolic size is not.
pytestmark = pytest.mark.usefixtures("as_a_user_calls")

SIZES = {"b": 3, "t": 20}


def linear(q, k):
    return gla_attention(q, k, k, return_state=True)


def attention(q, k):
    return flash_attention(q, k, k, causal=True, return_lse=True)


def experts(x, weights):
    return grouped_matmul(x, weights, jnp.zeros(x.shape[0], jnp.int32))


HEADS = "b, t, 4, 8", "b, t, 2, 8"
ROWS = "b, 16, 4, 8", "b, 16, 2, 8"


@pytest.mark.parametrize(
    ("run", "shapes"),
    [
        (attention, HEADS),
        (attention, ROWS),
        (linear, HEADS),
        (linear, ROWS),
        (mean_pooling, ("b, t, 8",)),
        (experts, ("t, 8", "2, 8, 6")),
    ],
)
def test_symbolic_sizes(run, shapes):
    scope = export.SymbolicScope()
    symbolic = [
        jax.ShapeDtypeStruct(export.symbolic_shape(x, scope=scope), jnp.float32) for x in shapes
    ]
    exported = export.export(jax.jit(run))(*symbolic)
    known = [[SIZES.get(size.strip()) or int(size) for size in x.split(",")] for x in shapes]
    arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(known)]
    for got, wanted in zip(
        jax.tree.leaves(exported.call(*arrays)), jax.tree.leaves(run(*arrays)), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_gradients_of_symbolic_sizes():
    (b,) = export.symbolic_shape("b")
    loss = lambda q: (flash_attention(q, q, q, causal=True) ** 2).sum()
    gradient = jax.jit(jax.grad(loss))
    exported = export.export(gradient)(jax.ShapeDtypeStruct((b, 16, 2, 8), jnp.float32))
    x = jax.random.normal(jax.random.key(0), (3, 16, 2, 8))
    np.testing.assert_allclose(exported.call(x), gradient(x), rtol=1e-4, atol=1e-5)


def test_a_platform_that_needs_known_sizes_says_so():
    (b,) = export.symbolic_shape("b")
    run = jax.jit(lambda q: flash_attention(q, q, q, platform="triton"))
    with pytest.raises(UnsupportedError, match="platform='triton' does not support symbolic sizes"):
        export.export(run)(jax.ShapeDtypeStruct((b, 16, 2, 8), jnp.float32))


SHAPE = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)


def test_a_program_for_an_unknown_device_is_refused():
    run = jax.jit(lambda q: flash_attention(q, q, q))
    with pytest.raises(
        UnsupportedError, match=r"for a TPU and it is not known which.*target_device"
    ):
        export.export(run, platforms=["tpu"])(SHAPE)


def test_a_program_for_several_backends_is_refused():
    run = jax.jit(lambda q: flash_attention(q, q, q))
    with pytest.raises(UnsupportedError, match="for several backends, here cpu, tpu"):
        export.export(run, platforms=["cpu", "tpu"])(SHAPE)


def test_xla_is_exported_for_all_backends():
    run = jax.jit(lambda q: flash_attention(q, q, q, platform="xla"))
    exported = export.export(run, platforms=["cpu", "cuda", "tpu"])(SHAPE)
    assert "custom_call" not in exported.mlir_module()


def test_a_program_for_a_tpu_has_its_kernel():
    run = jax.jit(lambda q: flash_attention(q, q, q, causal=True))
    with target_device("TPU v5 lite"):
        exported = export.export(run, platforms=["tpu"])(SHAPE)
    assert "tpu_custom_call" in exported.mlir_module()


def test_a_kernel_of_another_backend_is_not_replaced():
    run = jax.jit(lambda q: flash_attention(q, q, q, platform="triton"))
    refused = pytest.raises(UnsupportedError, match="platform='triton' does not support this call")
    with target_device("TPU v5 lite"), refused:
        export.export(run, platforms=["tpu"])(SHAPE)


several_devices = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
SPLIT = P("dp", None, "tp")


def split_call(kind, **arguments):
    """A jitted call over eight devices, its shape for the export, and its array."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)
    if kind == AxisType.Auto and arguments:
        arguments["mesh"] = mesh
    x = jax.random.normal(jax.random.key(0), (4, 32, 8, 16))
    x = jax.device_put(x, NamedSharding(mesh, SPLIT))
    attend = lambda q: flash_attention(q, q, q, causal=True, **arguments)
    gradient = jax.grad(lambda q: (attend(q) ** 2).sum())
    run = jax.jit(lambda q: (attend(q), gradient(q)))
    return run, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), x


@pytest.fixture(
    params=[(AxisType.Explicit, {}), (AxisType.Auto, {"in_specs": (SPLIT,) * 3})],
    ids=["explicit", "mesh"],
)
def exportable(request):
    kind, arguments = request.param
    return split_call(kind, **arguments)


def assert_same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


@several_devices
def test_a_program_over_several_devices(exportable):
    run, shape, x = exportable
    exported = export.export(run)(shape)
    assert exported.nr_devices == 8
    assert_same(exported.call(x), run(x))


@several_devices
def test_a_program_over_several_devices_is_read_back(exportable):
    pytest.importorskip("flatbuffers", reason="JAX needs flatbuffers to serialize a program")
    run, shape, x = exportable
    read_back = export.deserialize(export.export(run)(shape).serialize())
    assert_same(jax.jit(read_back.call)(x), run(x))


@several_devices
def test_a_program_over_automatic_axes_is_refused():
    run, shape, _ = split_call(AxisType.Auto)
    message = "flash_attention: a program over several devices with automatic mesh axes cannot be"
    with pytest.raises(UnsupportedError, match=f"{message} exported.*mesh=") as error:
        export.export(run)(shape)
    assert "\n" not in str(error.value)
