"""A partition spec becomes one that the mesh and the shape allow."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.xla_utils import get_corrected_named_sharding


@pytest.fixture(scope="module")
def mesh():
    types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((2, 4), ("dp", "tp"), types, devices=jax.devices("cpu"))


@pytest.mark.parametrize(
    ("shape", "spec", "given"),
    [
        ((4, 8), P("dp", "tp"), P("dp", "tp")),
        ((4, 8), P(("dp", "fsdp"), "sp"), P("dp", None)),
        ((8, 8), P(("dp", "tp")), P(("dp", "tp"), None)),
        ((4, 6), P("dp", "tp"), P("dp", None)),
        ((4, 8), P(("dp", "tp"), None), P()),
        ((4, 8, 3), P("dp"), P("dp", None, None)),
        ((4,), P("dp", "tp"), P("dp")),
        ((3, 3), P("dp", "tp"), P()),
        ((), P("dp"), P()),
        ((4, 8), P(P.UNCONSTRAINED, "tp"), P(P.UNCONSTRAINED, "tp")),
    ],
)
def test_axes_that_do_not_fit_are_dropped(mesh, shape, spec, given):
    assert get_corrected_named_sharding(shape, spec, mesh) == NamedSharding(mesh, given)


def test_the_result_places_an_array(mesh):
    x = jnp.zeros((4, 6, 8))
    sharding = get_corrected_named_sharding(x.shape, P(("dp", "fsdp"), "tp", "tp"), mesh)
    assert jax.device_put(x, sharding).sharding.shard_shape(x.shape) == (2, 6, 2)


def test_an_abstract_mesh_serves_as_well(mesh):
    sharding = get_corrected_named_sharding((4, 8), P("dp", "sp"), mesh.abstract_mesh)
    assert sharding == NamedSharding(mesh.abstract_mesh, P("dp", None))
