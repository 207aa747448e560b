"""Files that commands write: refused before the work where they cannot be written."""

import os
from pathlib import Path
from typing import NoReturn

import typer


def check(path: Path | None, option: str, folder: bool = False) -> None:
    """Refuse a file that cannot be written.

    Args:
        path: the file, if the option was given.
        option: the option that names it.
        folder: whether it may be a folder, in which the file gets a name.
    """
    if path is None:
        return
    if path.is_dir() and not folder:
        _refuse(path, option, "it is a folder")
    existing = next(x for x in (path, *path.absolute().parents) if x.exists())
    if existing != path and not existing.is_dir():
        _refuse(path, option, f"{existing} is not a folder")
    if not os.access(existing, os.W_OK):
        _refuse(path, option, f"no permission for {existing}")


def write(path: Path, text: str, option: str) -> None:
    """Write a file as a whole or not at all; its folder is made if there is none."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_text(text, "utf-8")
            return
        try:
            temporary.write_text(text, "utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _refuse(path, option, error.strerror or str(error))


def _refuse(path: Path, option: str, reason: str) -> NoReturn:
    raise typer.BadParameter(f"cannot write {path}: {reason}.", param_hint=option)
