"""The commands, each in a file of its own."""

import typer

from ejkernel.cli import bench, check, demo, info, mask, tune

app = typer.Typer(
    name="ejkernel",
    help="Attention and related operations for JAX: look at them, check them, time and tune them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (info.info, demo.demo, check.check, bench.bench, tune.tune, mask.mask):
    app.command()(command)
