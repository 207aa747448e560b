"""Programs for several chips: kernels run on every share, and transfers run behind kernels."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.modules import flash_attention, gla_attention, ring_attention
from tpu.ahead_of_time import compiled_over, kernels_in, mesh_of, needs_libtpu

pytestmark = [needs_libtpu, pytest.mark.tpu]

STARTED = re.compile(r"%([\w.-]+) = .* collective-permute-start\(")
# A hop that a device may leave out is a branch with the kernel in it.
KERNEL = re.compile(r"tpu_custom_call| conditional\(")
DONE = re.compile(r"collective-permute-done\(%([\w.-]+)\)")


def computations(program):
    """The lines of each computation of a compiled program, in the order in which they run."""
    text = program.as_text()
    assert "is_scheduled=true" in text.partition("\n")[0]
    return [part.splitlines() for part in re.split(r"\n(?=%|ENTRY)", text)]


def transfers(lines):
    """For every transfer of a computation whether a kernel runs between its start and its end."""
    starts = {m.group(1): i for i, line in enumerate(lines) if (m := STARTED.search(line))}
    ends = {m.group(1): i for i, line in enumerate(lines) if (m := DONE.search(line))}
    assert starts.keys() == ends.keys()
    return [
        any(KERNEL.search(line) for line in lines[start : ends[name]])
        for name, start in starts.items()
    ]


def gradients(run):
    return jax.grad(lambda x: run(x).astype(jnp.float32).sum())


def arrays(length, heads=8, kv_heads=4):
    shape = lambda n: jax.ShapeDtypeStruct((2, length, n, 128), jnp.bfloat16)
    return shape(heads), shape(kv_heads), shape(kv_heads)


@pytest.mark.parametrize(
    ("topology", "size", "causal"),
    [
        ("v5e:2x2", 4, True),
        ("v5e:4x4", 16, False),
        ("v6e:2x2", 4, True),
        ("tpu7x:2x2x1", 4, False),
    ],
)
def test_a_hop_of_the_ring_sends_while_it_computes(topology, size, causal):
    """Keys and values, and backward what earlier hops found of their gradients."""
    mesh = mesh_of(topology, ring=size)
    run = lambda x: ring_attention(*x, causal=causal, axis_name="ring", mesh=mesh, method="ring")
    program = compiled_over(mesh, P(None, "ring"), gradients(run), arrays(512 * size))
    *loops, entry = (found for lines in computations(program) if (found := transfers(lines)))
    if size <= 4:  # every hop by itself: keys forward, keys and their gradients backward
        assert not loops
        assert len(entry) == 2 * (size - 1) + 4 * (size - 1) + 2
    else:  # the first hop of both passes and the last one backward stand outside the loops
        assert sorted(map(len, loops)) == [2, 4]
        assert all(map(all, loops))
        assert len(entry) == 2 + 2 + 2 + 2
    assert entry.count(False) <= 2  # the gradients of keys and values, home from the last hop
    assert "all-gather" not in program.as_text()


def test_the_check_of_transfers_can_fail():
    lines = [
        "%a = (bf16[8]) collective-permute-start(%x)",
        "%b = bf16[8] collective-permute-done(%a)",
        '%k = bf16[8] custom-call(%b), custom_call_target="tpu_custom_call"',
    ]
    assert transfers(lines) == [False]
    assert transfers([lines[0], lines[2], lines[1]]) == [True]


@pytest.mark.parametrize(
    ("function", "topology", "rows", "heads"),
    [
        (flash_attention, "v5e:2x2", 2, 2),
        (flash_attention, "v5e:4x4", 2, 8),
        (gla_attention, "v5e:2x2", 2, 2),
    ],
)
def test_every_share_of_a_mesh_runs_the_kernels_and_needs_no_other(function, topology, rows, heads):
    mesh = mesh_of(topology, rows=rows, heads=heads)
    spec = P("rows", None, "heads")
    run = lambda x: function(*x, mesh=mesh, in_specs=(spec,) * 3)
    program = compiled_over(mesh, spec, gradients(run), arrays(1024, kv_heads=8))
    assert kernels_in(program) >= 2
    assert not re.search("all-gather|all-to-all|all-reduce|collective", program.as_text())


@pytest.mark.parametrize(
    ("function", "topology", "rows", "heads"),
    [
        (flash_attention, "v5e:2x2", 2, 2),
        (flash_attention, "v5e:4x4", 2, 8),
        (gla_attention, "v5e:2x2", 2, 2),
    ],
)
def test_explicit_axes_run_the_kernels_on_every_share(function, topology, rows, heads):
    """Automatic axes need callbacks that JAX gives only to a libtpu with a TPU."""
    mesh = mesh_of(topology, rows=rows, heads=heads)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    spec = P("rows", None, "heads")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run = gradients(lambda x: function(*x))
        program = compiled_over(mesh, spec, run, arrays(1024, kv_heads=8))
    assert kernels_in(program) >= 2
    assert not re.search("all-gather|all-to-all|all-reduce|collective", program.as_text())


@pytest.mark.parametrize("function", [flash_attention, gla_attention])
def test_the_kernels_run_inside_a_shard_map_that_checks_what_varies(function):
    mesh = mesh_of("v5e:2x2", rows=2)
    run = jax.shard_map(
        lambda x: function(*x), mesh=mesh, in_specs=(P("rows"),), out_specs=P("rows")
    )
    program = compiled_over(mesh, P("rows"), gradients(run), arrays(1024))
    assert kernels_in(program) >= 2
