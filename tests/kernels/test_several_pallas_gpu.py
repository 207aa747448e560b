"""Programs for several NVIDIA GPUs, compiled ahead of time: kernels, and no communication."""

import json
from pathlib import Path

import gpu_compile
import pytest
from kernels import several_gpus

pytestmark = pytest.mark.skipif(
    gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not())
)


@pytest.fixture(scope="module")
def programs():
    """What the programs hold, by "function kind direction"."""
    done = gpu_compile.in_a_process(
        str(Path(several_gpus.__file__)), timeout=300, TF_CPP_MIN_LOG_LEVEL="3"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.xdist_group("several_gpus")
@pytest.mark.parametrize("kind", list(several_gpus.KINDS))
@pytest.mark.parametrize("name", list(several_gpus.CALLS))
def test_batch_and_heads_stay_split_with_no_communication(programs, name, kind):
    forward, gradients = (programs[f"{name} {kind} {x}"] for x in ("forward", "gradients"))
    assert forward["collectives"] == []
    # The gradients of weights are sums over the devices that share the weights.
    assert set(gradients["collectives"]) <= ({"all-reduce"} if name == "grouped_matmul" else set())


@pytest.mark.xdist_group("several_gpus")
@pytest.mark.parametrize("kind", list(several_gpus.KINDS))
@pytest.mark.parametrize("name", ["flash_attention", "blocksparse_attention"])
def test_every_device_runs_the_kernels(programs, name, kind):
    for direction in ("forward", "gradients"):
        assert "mosaic_gpu_v2" in programs[f"{name} {kind} {direction}"]["kernels"]
