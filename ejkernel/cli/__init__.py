"""The `ejkernel` command; it needs the extra `cli`."""

import importlib.util
import sys


def main() -> None:
    """Run the command line, or say in one sentence what is missing for it."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"ejkernel: the command line needs {' and '.join(missing)}: "
            "pip install 'ejkernel[cli]'."
        )
    from ejkernel.cli.app import app

    app()
