"""Runs commands of the command line in this process."""

from typer.testing import CliRunner

from ejkernel.cli.app import app

WIDTHS = (80, 120, 200)


def run(*arguments, columns=200, **environment):
    """A command as in a terminal of this width that shows no colours."""
    variables = {"COLUMNS": str(columns), "LINES": "24", "TERM": "dumb", **environment}
    return CliRunner().invoke(app, list(arguments), env=variables)


def sentence(shown):
    """What was printed, without the frame and the line breaks of an error."""
    return " ".join(shown.output.replace("│", " ").split())


def too_wide(shown, columns):
    """The lines that do not fit."""
    return [line for line in shown.output.splitlines() if len(line.rstrip()) > columns]
