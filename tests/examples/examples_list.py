"""How the scripts of examples/ are run by the tests, and what they print."""

from pathlib import Path
from typing import NamedTuple

EXAMPLES = Path(__file__).parents[2] / "examples"


class Run(NamedTuple):
    """A script with its options, the claims that it checks, and parts of its last table."""

    script: str
    arguments: tuple[str, ...]
    claims: int
    shows: tuple[str, ...]


RUNS = (
    Run("train_gpt.py", ("--plot", "{plot}"), 3, ("packed rows hold", "padded")),
    Run(
        "train_gpt.py",
        ("--mesh", "2x2", "--steps", "24"),
        4,
        ("sharded over 2x2: the same losses", "packed rows hold"),
    ),
    Run(
        "serve.py",
        (),
        3,
        ("ok: 0 programs compiled", "100.0% of 482 tokens", "steps to first token"),
    ),
    Run("serve.py", ("--cache", "int8"), 3, ("ok: 0 programs compiled", "cache, KiB")),
    Run("mixture_of_experts.py", (), 3, ("dense / grouped",)),
    Run("mixture_of_experts.py", ("--devices", "4"), 6, ("over 4 devices",)),
    Run("gated_linear_attention.py", ("--plot", "{plot}"), 3, ("KV cache of softmax attention",)),
    Run("long_context.py", (), 4, ("slowest / mean work", "zigzag")),
    Run("flow_matching.py", ("--plot", "{plot}"), 2, ("distance to the nearest ring",)),
    Run("own_kernel.py", (), 4, ("candidate", "chosen: AddNormConfig")),
)


def run_id(run: Run) -> str:
    """The name of a test: the script and its options."""
    options = [x.strip("-") for x in run.arguments if x not in ("--plot", "{plot}")]
    return "-".join([run.script.removesuffix(".py"), *options])
