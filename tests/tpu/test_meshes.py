"""Programs for several chips: kernels run on every share, and transfers run behind kernels."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.errors import PerformanceWarning, UnsupportedError
from ejkernel.modules import (
    blocksparse_attention,
    flash_attention,
    gla_attention,
    lightning_attention,
    page_attention,
    ring_attention,
)
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
        pytest.param("v5e:4x4", 16, True, marks=pytest.mark.slow),
        ("v5p:2x2x1", 4, True),
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
    mesh = mesh_of(topology, rows=rows, heads=heads)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    spec = P("rows", None, "heads")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run = gradients(lambda x: function(*x))
        program = compiled_over(mesh, spec, run, arrays(1024, kv_heads=8))
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
def test_automatic_axes_use_plain_xla_and_say_so(function, topology, rows, heads):
    """libtpu cannot be told how a kernel is partitioned; its own operations it splits by itself."""
    mesh = mesh_of(topology, rows=rows, heads=heads)
    spec = P("rows", None, "heads")
    run = lambda x, **options: function(*x, **options)
    with pytest.warns(PerformanceWarning, match="cannot partition kernels over automatic"):
        program = compiled_over(mesh, spec, gradients(run), arrays(1024, kv_heads=8))
    assert kernels_in(program) == 0
    assert not re.search("all-gather|all-to-all|all-reduce|collective", program.as_text())
    with pytest.raises(UnsupportedError, match="platform='pallas' is not available here"):
        compiled_over(mesh, spec, lambda x: run(x, platform="pallas"), arrays(1024, kv_heads=8))


@pytest.mark.parametrize("function", [flash_attention, gla_attention])
def test_the_kernels_run_inside_a_shard_map_that_checks_what_varies(function):
    mesh = mesh_of("v5e:2x2", rows=2)
    run = jax.shard_map(
        lambda x: function(*x), mesh=mesh, in_specs=(P("rows"),), out_specs=P("rows")
    )
    program = compiled_over(mesh, P("rows"), gradients(run), arrays(1024))
    assert kernels_in(program) >= 2


COLLECTIVE = re.compile(
    r"= (\w+\[[\d,]*\]).* "
    r"(?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


@pytest.mark.parametrize(("topology", "size"), [("v5e:2x4", 8), ("v5e:4x4", 16)])
def test_a_split_sequence_exchanges_one_state_each_way(topology, size):
    """Whatever its length; compiled for a TPU the reduce-scatter may be an all-reduce."""
    mesh = mesh_of(topology, sp=size)
    run = lambda x: lightning_attention(*x, axis_name="sp", mesh=mesh, platform="pallas")
    state = 2 * 4 * (128 * 128 + 1)  # and a decay, for 2 rows of 4 heads
    for shard in (256, 512):
        program = compiled_over(mesh, P(None, "sp"), gradients(run), arrays(shard * size))
        assert kernels_in(program) >= 2
        found = COLLECTIVE.findall(program.as_text())
        sizes = [math.prod(map(int, re.findall(r"\d+", x.partition("[")[2]))) for x in found]
        assert len(sizes) == 2
        assert set(sizes) <= {size * state, state}


@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize("queries", [1, 4])
def test_devices_attend_to_the_pages_that_they_hold(window, queries):
    """A context of 64k tokens over four chips: no page moves, and two collectives merge."""
    mesh = mesh_of("v5e:2x2", context=4)
    shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)
    arrays = (shape(8, queries, 32, 128), *[shape(16384, 32, 8, 128)] * 2)
    integers = (shape(8, dtype=jnp.int32), shape(8, 2048, dtype=jnp.int32))

    def run(arguments):
        return page_attention(
            *arguments, sliding_window=window, axis_name="context", mesh=mesh, platform="pallas"
        )

    split = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    specs = (P(), P("context"), P("context"), P(), P())
    given = tuple(map(split, (*arrays, *integers), specs))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(run).lower(given).compile()
    assert kernels_in(program) >= 1
    text = program.as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 2
    assert not re.search("all-gather|all-to-all|collective-permute", text)


def test_block_sparse_attention_gathers_keys_and_scatters_their_gradients():
    mesh = mesh_of("v5e:2x2", sequence=4)
    blocks = jnp.tri(64, dtype=bool)

    def run(x):
        return blocksparse_attention(*x, block_mask=blocks, axis_name="sequence", mesh=mesh)

    program = compiled_over(mesh, P(None, "sequence"), gradients(run), arrays(4096))
    assert kernels_in(program) >= 2
    assert not re.search("all-to-all|collective-permute", program.as_text())
