"""One process of several: runs operations over a mesh that spans all, on the loopback interface.

    python worker.py PORT PROCESSES PROCESS [CALL ...]

Prints `equal CALL` for every call whose results and gradients are those of this process alone. Of
the call `wait` it prints `waiting` and then joins in one collective after the other, until somebody
ends one of the processes. Of the call `tuned` it prints the parameters that it chooses, `chosen`,
and those that it would choose if it were the only process, `alone`.
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import _jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import (
    flash_attention,
    gla_attention,
    grouped_matmul,
    page_attention,
    ring_attention,
)
from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    PersistentCache,
    default_executor,
    selection,
)
from ejkernel.parallel import combine, dispatch, permute_sequence, restore_sequence

DEVICES = 2  # of a process
LONGEST = 240  # seconds of a call that waits
HEARTBEAT = 10  # seconds without one, after which a process counts as gone
ROWS, SEQUENCE, HEADS = P("x"), P(None, "x"), P(None, None, "x")
ROWS_AND_SEQUENCE = P("y", "x")


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def attention_arrays(batch, heads=4, kv_heads=2):
    return draw((batch, 32, heads, 8), (batch, 32, kv_heads, 8), (batch, 32, kv_heads, 8))


def gla_arrays():
    query, key, value = attention_arrays(1)
    return [query, key, value, -abs(key), *draw((1, 2, 8, 8))]


def gla(query, key, value, gate, state, **options):
    return gla_attention(query, key, value, gate, initial_state=state, return_state=True, **options)


def grouped(rows, weights, **options):
    return grouped_matmul(rows, weights, np.arange(32) // 8, **options)


def experts(rows, weights, mesh=None):
    ids = np.arange(32) * 5 % 9  # the last of them is no expert's
    if mesh is None:
        return grouped_matmul(rows, weights, ids)

    def local(rows, ids, weights):
        rows, sizes, plan = dispatch(rows, ids, axis_name="x", experts=8)
        return combine(grouped_matmul(rows, weights, group_sizes=sizes), plan)

    return jax.shard_map(local, mesh=mesh, in_specs=ROWS, out_specs=ROWS)(rows, ids, weights)


def zigzag(*arrays, mesh=None, **options):
    if mesh is None:
        return ring_attention(*arrays, causal=True)
    order = {"shards": mesh.shape["x"], "placement": "zigzag"}
    placed = (permute_sequence(x, **order) for x in arrays)
    out = ring_attention(*placed, causal=True, placement="zigzag", mesh=mesh, **options)
    return restore_sequence(out, **order)


def paged(query, key_cache, value_cache, **options):
    tables, lengths = np.arange(6).reshape(2, 3), np.array([11, 6])
    return page_attention(query, key_cache, value_cache, lengths, tables, **options)


# Function, arrays, how each is split, options that split them, whether it has gradients.
CALLS = {
    "flash": (
        functools.partial(flash_attention, causal=True),
        attention_arrays(8),
        (ROWS,) * 3,
        {"in_specs": (ROWS,) * 3},
        True,
    ),
    "ring": (
        functools.partial(ring_attention, causal=True),
        attention_arrays(1),
        (SEQUENCE,) * 3,
        {"axis_name": "x"},
        True,
    ),
    "grouped": (
        grouped,
        draw((32, 8), (4, 8, 16)),
        (ROWS, P()),
        {"in_specs": (ROWS, P(), ROWS)},
        True,
    ),
    "linear": (gla, gla_arrays(), (*(SEQUENCE,) * 4, P()), {"axis_name": "x"}, True),
    "paged": (
        paged,
        draw((2, 8, 8), (6, 4, 8, 8), (6, 4, 8, 8)),
        (SEQUENCE, HEADS, HEADS),
        {"in_specs": (SEQUENCE, HEADS, HEADS)},
        False,
    ),
    "pages": (
        paged,
        draw((2, 8, 8), (8, 4, 2, 8), (8, 4, 2, 8)),
        (P(), ROWS, ROWS),
        {"axis_name": "x"},
        False,
    ),
    "experts": (experts, draw((32, 8), (8, 8, 16)), (ROWS, ROWS), {}, True),
    "zigzag": (
        zigzag,
        attention_arrays(2),
        (ROWS_AND_SEQUENCE,) * 3,
        {"axis_name": "x", "in_specs": (ROWS_AND_SEQUENCE,) * 3, "method": "ring"},
        True,
    ),
}


def results(run, arrays, has_gradients):
    """The results of a call and the gradients of the sum of their squares."""
    if not has_gradients:
        return run(*arrays)
    loss = lambda *x: sum((y**2).sum() for y in jax.tree.leaves(run(*x)))
    every = tuple(range(len(arrays)))
    return run(*arrays), jax.grad(loss, every)(*arrays)


def check(name, mesh):
    run, arrays, specs, options, has_gradients = CALLS[name]
    alone = jax.jit(lambda *x: results(run, x, has_gradients))(*arrays)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    place = lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])
    split = functools.partial(run, mesh=mesh, **options)
    together = jax.jit(
        lambda *x: results(split, x, has_gradients), out_shardings=NamedSharding(mesh, P())
    )(*map(place, arrays, shardings))
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a.addressable_data(0), b, rtol=1e-4, atol=1e-4)
    print("equal", name, flush=True)


def join(port, processes, process):
    """Become one of the processes. Nothing listens or sends on any but the loopback interface."""
    _jax.make_gloo_tcp_collectives = functools.partial(
        _jax.make_gloo_tcp_collectives, hostname="127.0.0.1"
    )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # which would ignore SIGTERM
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address,
        processes,
        process,
        coordinator_bind_address=address,
        initialization_timeout=60,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=60,
    )


def wait(mesh):
    """One collective after the other, until the end of another process ends this one."""
    ones = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, ROWS), lambda i: jnp.ones(1)
    )
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        total(ones).block_until_ready()
        print("waiting", flush=True)
        time.sleep(0.5)


def tuned(process):
    """Choose the parameters of a call of which the disk cache of each process holds others."""
    call = default_executor().invocation(flash_attention, *attention_arrays(1))
    entry = {"platform": "xla", "fwd_params": {"q_blocksize": 8 << process}}
    PersistentCache("flash_attention").put(call.key, entry)
    print("chosen", default_executor().chooser.choose(call).params, flush=True)
    selection._several_processes = lambda: False
    chain = ConfigSelectorChain(ConfigCache(), persistent=PersistentCache)
    print("alone", chain.choose(call).params, flush=True)


def main(port, processes, process, *names):
    join(int(port), int(processes), int(process))
    devices = np.array(jax.devices())
    if devices.size != DEVICES * int(processes):
        raise RuntimeError(f"{devices.size} devices in {processes} processes")
    line, both = Mesh(devices, ("x",)), Mesh(devices.reshape(-1, DEVICES), ("x", "y"))
    for name in names:
        if name == "tuned":
            tuned(int(process))
        elif name == "wait":
            wait(line)
        else:
            check(name, both if name == "zigzag" else line)


if __name__ == "__main__":
    main(*sys.argv[1:])
