"""jit, vmap, remat and shard_map leave the results of every implementation as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cases import all_cases, served
from conformance.oracle import assert_same
from jax.sharding import Mesh, PartitionSpec

from ejkernel.cli.oracle import GRADIENT_FLOOR, VALUE_FLOOR, with_gradients
from ejkernel.ops import axes, executor
from ejkernel.ops.executor import Request

CASES = all_cases(thorough=False, distinct=True, interpreted=False)


def runner(call, **request):
    wanted = Request(platform=call.platform, **request)
    return lambda inputs: executor.run(call.op, inputs, call.spec, wanted)


@pytest.mark.parametrize("case", CASES)
def test_vmap_equals_a_loop(case):
    calls = [case.call(seed=seed) for seed in (0, 1)]
    served(case, calls[0], "forward", "backward")
    run = runner(calls[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(call.inputs for call in calls))
    outputs, gradients = jax.vmap(with_gradients(run))(stacked)
    for i, call in enumerate(calls):
        one, one_gradients = with_gradients(run)(call.inputs)
        assert_same(jax.tree.map(lambda x, i=i: x[i], outputs), one, VALUE_FLOOR, "output")
        assert_same([g[i] for g in gradients], one_gradients, GRADIENT_FLOOR, "gradient")


@pytest.mark.parametrize("case", CASES)
def test_vmap_over_the_query_alone_equals_a_loop(case):
    call, other = case.call(seed=0), case.call(seed=1)
    served(case, call, "forward", "backward")
    run = runner(call)
    first = call.inputs._fields[0]
    queries = [getattr(c.inputs, first) for c in (call, other)]

    def of_query(query):
        return with_gradients(run)(call.inputs._replace(**{first: query}))

    outputs, gradients = jax.vmap(of_query)(jnp.stack(queries))
    for i, query in enumerate(queries):
        one, one_gradients = of_query(query)
        assert_same(jax.tree.map(lambda x, i=i: x[i], outputs), one, VALUE_FLOOR, "output")
        assert_same([g[i] for g in gradients], one_gradients, GRADIENT_FLOOR, "gradient")


@pytest.mark.parametrize("case", CASES)
def test_jit_and_remat_change_nothing(case):
    call = case.call()
    served(case, call, "forward", "backward")
    run = runner(call)
    plain = with_gradients(run)(call.inputs)
    for changed in (
        jax.jit(with_gradients(run)),
        with_gradients(jax.checkpoint(run)),
    ):
        outputs, gradients = changed(call.inputs)
        assert_same(outputs, plain[0], VALUE_FLOOR, "output")
        assert_same(gradients, plain[1], GRADIENT_FLOOR, "gradient")


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_changes_nothing(case):
    """Batch over two devices, heads over four, with specs for the first three arrays alone."""
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    call = case.call()
    served(case, call, "forward", "backward")
    ranks = [getattr(getattr(call.inputs, n, None), "ndim", None) for n in call.op.operands[:3]]
    letters = [
        axes.of_field(type(call.inputs), name, rank)
        for name, rank in zip(call.op.operands[:3], ranks, strict=True)
    ]
    sizes = dict(zip(letters[0], getattr(call.inputs, call.op.operands[0]).shape, strict=True))
    over = {"b": "dp"} if sizes.get("b", 1) % 2 == 0 else {}
    if "n" in call.op.shardable and sizes.get("n", 1) % 4 == 0:
        over |= {"n": "tp", "k": "tp"}
    specs = tuple(PartitionSpec(*(over.get(letter) for letter in one)) for one in letters)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    plain = with_gradients(runner(call))(call.inputs)
    sharded = with_gradients(runner(call, mesh=mesh, in_specs=specs))(call.inputs)
    assert_same(sharded[0], plain[0], VALUE_FLOOR, "output")
    assert_same(sharded[1], plain[1], GRADIENT_FLOOR, "gradient")
