"""Programs compiled for TPUs that are not present: libtpu needs no TPU to compile for one."""

import importlib.util
import math
import os
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.ops.platform import Device, device_of

GENERATIONS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "7x": "tpu7x:2x2x1",
}

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: make test-tpu"
)


def mesh_of(topology: str, **axes: int) -> Mesh:
    """So many chips of a topology, as a mesh of these axes."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no machine to ask
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nor a chip that two processes could claim
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    count = math.prod(axes.values())
    return Mesh(np.array(devices[:count]).reshape(tuple(axes.values())), tuple(axes))


def device(generation: str) -> Device:
    """How the chips of a generation are described to an implementation."""
    mesh = mesh_of(GENERATIONS[generation], chip=1)
    sharding = NamedSharding(mesh, PartitionSpec())
    return device_of([jax.ShapeDtypeStruct((), np.float32, sharding=sharding)])


def compiled(generation: str, function: Any, arguments: Any, **options: Any) -> Any:
    """`function(arguments)` compiled for one chip of a generation; arguments are shapes.

    `options` are those of `jax.jit`.
    """
    mesh = mesh_of(GENERATIONS[generation], chip=1)
    return compiled_over(mesh, PartitionSpec(), function, arguments, **options)


def compiled_over(
    mesh: Mesh, spec: PartitionSpec, function: Any, arguments: Any, **options: Any
) -> Any:
    """`function(arguments)` compiled for a mesh over which every argument is split so."""
    split = NamedSharding(mesh, spec)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), arguments
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, **options).lower(shapes).compile()


def kernels_in(program: Any) -> int:
    """How many Pallas kernels a compiled program starts."""
    return program.as_text().count("tpu_custom_call")
