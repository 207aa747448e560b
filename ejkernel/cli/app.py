"""The commands, each in a file of its own."""

from collections.abc import Callable
from typing import Annotated

import typer

from ejkernel import __version__
from ejkernel.cli import bench, check, demo, info, mask, tune

app: typer.Typer = typer.Typer(
    name="ejkernel",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted.",
)
command: Callable[..., None]
for command in (info.info, demo.demo, check.check, bench.bench, tune.tune, mask.mask):
    app.command()(command)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"ejkernel {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def ejkernel(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Attention kernels for JAX: inspect, check, benchmark and tune them."""
    for problem in info.invalid_settings():
        raise typer.BadParameter(problem)
