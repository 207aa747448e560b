"""`axis_name=`: where the axis comes from, and what each mistake is called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import split_axis

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")

X = jnp.ones((2, 64, 4))
SPEC = P(None, "sp")


def make_mesh(*kinds):
    return jax.make_mesh((2, 4), ("dp", "sp"), axis_types=kinds or (AxisType.Auto,) * 2)


EXPLICIT = (AxisType.Explicit,) * 2


def resolve(x=X, axis_name="sp", **options):
    arrays, lengths = {"query": x, "key": x}, {"queries": x.shape[1], "keys": x.shape[1]}
    return split_axis.resolve(
        "op", axis_name, arrays=arrays, lengths=lengths, specs=(SPEC, SPEC), **options
    )


def test_without_a_name_nothing_is_split_and_the_mesh_is_left_alone():
    mesh = make_mesh()
    split = resolve(axis_name=None, mesh=mesh, in_specs=(P("dp"),) * 2)
    assert (split.name, split.shards, split.mesh, split.in_specs) == (None, 1, mesh, (P("dp"),) * 2)


def test_without_a_mesh_one_device_has_everything():
    assert resolve() == split_axis.SplitAxis(None)


def test_a_mesh_that_is_given_and_its_specs():
    mesh = make_mesh()
    split = resolve(mesh=mesh)
    assert (split.name, split.shards, split.mesh, split.in_specs) == ("sp", 4, mesh, (SPEC, SPEC))
    assert split.whole(64) == 64
    more = (P("dp", "sp"), P("dp", ("sp",)), P("dp"))
    assert resolve(mesh=mesh, in_specs=more).in_specs == more


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_mesh_of_the_context():
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        assert resolve().shards == 4
        assert resolve(in_specs=(P("dp", "sp"),) * 2).in_specs == (P("dp", "sp"),) * 2
    with Mesh(np.array(jax.devices()), ("sp",)):
        assert resolve().shards == 8


def test_an_axis_that_is_mapped_already():
    """The arrays are the shares of a device: the whole is longer."""
    found = []

    def local(x):
        found.append(resolve(x))
        return x

    jax.eval_shape(jax.shard_map(local, mesh=make_mesh(), in_specs=SPEC, out_specs=SPEC), X)
    (split,) = found
    assert (split.name, split.shards, split.mesh, split.in_specs) == ("sp", 4, None, None)
    assert split.whole(16) == 64


@pytest.mark.parametrize("eagerly", [True, False])
def test_types_that_name_the_axis_need_no_mesh(eagerly):
    x = jax.device_put(X, NamedSharding(make_mesh(*EXPLICIT), P("dp", "sp")))
    found = []
    run = lambda x: found.append(resolve(x)) or x
    run(x) if eagerly else jax.eval_shape(run, x)
    assert found == [split_axis.SplitAxis("sp", 4)]


def test_an_automatic_axis_among_explicit_ones():
    x = jax.device_put(X, NamedSharding(make_mesh(AxisType.Explicit, AxisType.Auto), P("dp")))
    assert resolve(x).in_specs == (P("dp", "sp", None),) * 2


def mapped(**options):
    run = lambda x: resolve(x, **options) and x
    return jax.shard_map(run, mesh=make_mesh(), in_specs=SPEC, out_specs=SPEC)(X)


def under_explicit_axes(x):
    with jax.set_mesh(make_mesh(*EXPLICIT)):
        return resolve(x)


@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: resolve(axis_name=3), "axis_name must be a string, got 3"),
        (
            lambda: resolve(axis_name="pp", mesh=make_mesh()),
            "'pp' is not an axis of the mesh, which has dp, sp",
        ),
        (
            lambda: resolve(X[:, :62], mesh=make_mesh()),
            "62 queries and 62 keys do not divide over the 4 devices of 'sp'",
        ),
        (lambda: resolve(in_specs=(SPEC, SPEC)), "in_specs= needs mesh="),
        (
            lambda: resolve(mesh=make_mesh(), in_specs=(SPEC, P("sp"))),
            r"axis 1 of key must be split over 'sp', got P\('sp',\)",
        ),
        (
            lambda: mapped(mesh=make_mesh()),
            "'sp' is already mapped here; leave mesh= and in_specs=",
        ),
        (lambda: mapped(in_specs=(SPEC, SPEC)), "'sp' is already mapped here"),
        (
            lambda: under_explicit_axes(X),
            r"axis 1 of query must be split over 'sp', its type has P\(\); jax.sharding.reshard",
        ),
        (
            lambda: resolve(jax.device_put(X, NamedSharding(make_mesh(*EXPLICIT), P("dp")))),
            "axis 1 of query must be split over 'sp'",
        ),
    ],
)
def test_a_mistake_is_named(call, message):
    with pytest.raises(ValueError, match=f"op: .*{message}") as error:
        call()
    assert "\n" not in str(error.value)
