"""jit, vmap, remat, sharding and forward mode give what every implementation gives without them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cases import all_cases, served, workloads_of
from conformance.oracle import assert_same
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import ejkernel
from ejkernel.cli.oracle import GRADIENT_FLOOR, VALUE_FLOOR, with_gradients
from ejkernel.kernels import OPS
from ejkernel.ops import axes, executor
from ejkernel.ops.executor import Request

# All of them together for every workload, each alone for the core.
CASES = all_cases(xla="fullest", gpu="core", tpu="none", borrowed="none", daily="core")
CORE = [
    pytest.param(case, id=x.id, marks=x.marks)
    for x in all_cases(xla="none", gpu="core", tpu="none", borrowed="none")
    for case in x.values
    if "core" in case.workload.tags
]


def runner(call, **request):
    wanted = Request(platform=call.platform, **request)
    return lambda inputs: executor.run(call.op, inputs, call.spec, wanted)


def compiled(run):
    """Outputs and gradients in one program, which costs less to compile than two."""
    return jax.jit(with_gradients(run))


@pytest.mark.parametrize("case", CASES)
def test_jit_vmap_and_remat_together_equal_a_loop(case):
    calls = [case.call(seed=seed) for seed in (0, 1)]
    served(case, calls[0], "forward", "backward")
    run = runner(calls[0])
    assert_equals_a_loop(
        with_gradients(jax.checkpoint(run)), with_gradients(run), [call.inputs for call in calls]
    )


@pytest.mark.parametrize("name", OPS)
def test_promotions_that_a_program_forbids_itself_are_not_forbidden_to_us(name):
    """Neither in a call nor in its derivatives, which are traced after it."""
    function = getattr(ejkernel, name)
    core = [x for x in workloads_of(name).WORKLOADS if "core" in x.tags]
    arguments = core[-1].build(0, jnp.float32)
    floating = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    first = next(name for name, x in arguments.items() if floating(x))

    def loss(x):
        out = function(**arguments | {first: x})
        return sum(x.sum() for x in jax.tree.leaves(out) if floating(x))

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jax.grad(loss), arguments[first])
        jax.eval_shape(lambda x: jax.jvp(loss, (x,), (x,)), arguments[first])


@pytest.mark.parametrize("case", CORE)
def test_jit_and_remat_change_nothing(case):
    call = case.call()
    served(case, call, "forward", "backward")
    run = runner(call)
    eager = with_gradients(run)(call.inputs)
    for changed in (run, jax.checkpoint(run)):
        outputs, gradients = compiled(changed)(call.inputs)
        assert_same(outputs, eager[0], VALUE_FLOOR, "output")
        assert_same(gradients, eager[1], GRADIENT_FLOOR, "gradient")


def assert_equals_a_loop(run, one, arguments):
    """The batched `run` gives what `one` gives for each of the arguments."""
    outputs, gradients = jax.jit(jax.vmap(run))(jax.tree.map(lambda *x: jnp.stack(x), *arguments))
    one = jax.jit(one)
    for i, argument in enumerate(arguments):
        output, gradient = one(argument)
        assert_same([x[i] for x in jax.tree.leaves(outputs)], output, VALUE_FLOOR, "output")
        assert_same([x[i] for x in gradients], gradient, GRADIENT_FLOOR, "gradient")


@pytest.mark.parametrize("case", CORE)
def test_vmap_equals_a_loop(case):
    calls = [case.call(seed=seed) for seed in (0, 1)]
    served(case, calls[0], "forward", "backward")
    run = with_gradients(runner(calls[0]))
    assert_equals_a_loop(run, run, [call.inputs for call in calls])


@pytest.mark.parametrize("case", CORE)
def test_vmap_over_the_query_alone_equals_a_loop(case):
    call, other = case.call(seed=0), case.call(seed=1)
    served(case, call, "forward", "backward")
    first = call.inputs._fields[0]

    def of_query(query):
        return with_gradients(runner(call))(call.inputs._replace(**{first: query}))

    queries = [getattr(x.inputs, first) for x in (call, other)]
    assert_equals_a_loop(of_query, of_query, queries)


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
    plain = compiled(runner(call))(call.inputs)
    sharded = compiled(runner(call, mesh=mesh, in_specs=specs))(call.inputs)
    assert_same(sharded[0], plain[0], VALUE_FLOOR, "output")
    assert_same(sharded[1], plain[1], GRADIENT_FLOOR, "gradient")


MESH = {"dp": 2, "tp": 4}
# What an op can split with no exchange between devices; by default batch and heads.
OVER = {
    "grouped_matmul": {"n": "tp"},
    "mean_pooling": {"b": "dp", "d": "tp"},
}


def splits(op, x, letters):
    """The spec of an array that is split wherever it can be."""
    over = OVER.get(op.name, {"b": "dp", "n": "tp", "k": "tp"})
    entries = []
    for size, letter in zip(x.shape, letters or (), strict=False):
        axis = over.get(letter.removeprefix("#"))
        fits = letter.removeprefix("#") in op.shardable and size % MESH.get(axis, 1) == 0
        entries.append(axis if fits else None)
    return PartitionSpec(*entries)


def collectives(program):
    names = r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return set(re.findall(names, program.as_text()))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("case", CASES)
def test_split_arrays_give_the_same_with_no_collective(case, kind):
    """Batch over two devices, heads over four, as the arrays are; results are split alike."""
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    call = case.call()
    served(case, call, "forward", "backward")
    run, op = runner(call), case.op
    plain = compiled(run)(call.inputs)
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, splits(op, x, letters)))
            for x, letters in zip(
                jax.tree.leaves(call.inputs), axes.of_leaves(call.inputs), strict=True
            )
        ]
        inputs = jax.tree.unflatten(jax.tree.structure(call.inputs), placed)
        forward = jax.jit(run).lower(inputs).compile()
        both = compiled(run).lower(inputs).compile()
        outputs, gradients = both(inputs)
    assert_same(outputs, plain[0], VALUE_FLOOR, "output")
    assert_same(gradients, plain[1], GRADIENT_FLOOR, "gradient")
    assert collectives(both) <= {"all-reduce"}
    kept = [
        (x.sharding, NamedSharding(mesh, splits(op, x, letters)), x.ndim)
        for x, letters in zip(outputs, axes.of_leaves(outputs), strict=True)
    ]
    assert all(got.is_equivalent_to(wanted, rank) for got, wanted, rank in kept)
    shares_state = any(
        "k" in letters and x.shape[letters.index("k")] % MESH["tp"]
        for x, letters in zip(outputs, axes.of_leaves(outputs), strict=True)
    )
    assert collectives(forward) <= ({"all-reduce"} if shares_state else set())


@pytest.mark.parametrize("case", [x for x in CASES if "-xla-" in x.id])
def test_the_tangent_is_the_slope_and_the_adjoint_of_the_gradient(case):
    """In float64: against central differences, and `<c, J v> = <J^T c, v>`."""
    with jax.enable_x64(True):
        call = case.call(jnp.float64)
        served(case, call, "forward", "backward")
        leaves, structure = jax.tree.flatten(call.inputs)
        floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
        draw = np.random.default_rng(0).standard_normal
        along = [jnp.asarray(draw(leaves[i].shape)) for i in floats]

        def run(given):
            merged = list(leaves)
            for i, x in zip(floats, given, strict=True):
                merged[i] = x
            outputs = jax.tree.leaves(runner(call)(jax.tree.unflatten(structure, merged)))
            # The log-sum-exp of a row that sees nothing is -inf, whose differences are not numbers.
            return [jnp.where(jnp.isfinite(x), x, 0) for x in outputs]

        @jax.jit
        def all_of_it(given, along):
            outputs, tangents = jax.jvp(run, (given,), (along,))
            cotangents = jax.tree.map(jnp.cos, outputs)
            gradients = jax.vjp(run, given)[1](cotangents)[0]
            step = 1e-6
            ahead, behind = (
                run([x + h * d for x, d in zip(given, along, strict=True)]) for h in (step, -step)
            )
            slopes = [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]
            return tangents, slopes, inner(cotangents, tangents), inner(gradients, along)

        found = jax.device_get(all_of_it([leaves[i] for i in floats], along))
    tangents, slopes, left, right = found
    for tangent, slope in zip(tangents, slopes, strict=True):
        size = max(1.0, np.abs(slope).max())
        np.testing.assert_allclose(tangent, slope, rtol=0, atol=1e-6 * size)
    np.testing.assert_allclose(left, right, rtol=1e-9)


def inner(a, b):
    return sum((x * y).sum() for x, y in zip(a, b, strict=True))
