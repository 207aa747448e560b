"""Files that commands write: refused before the work where they cannot be written."""

import os
from pathlib import Path
from typing import NoReturn

import typer


def check(path: Path | None, option: str) -> None:
    """Refuse a file that cannot be written.

    Args:
        path: the file, if the option was given.
        option: the option that names it.
    """
    if path is None:
        return
    if path.is_dir():
        _refuse(path, option, "it is a folder")
    existing = next(x for x in (path, *path.absolute().parents) if x.exists())
    if existing != path and not existing.is_dir():
        _refuse(path, option, f"{existing} is not a folder")
    if not os.access(existing, os.W_OK):
        _refuse(path, option, f"no permission for {existing}")
    # A regular file is replaced by a new one, which needs its folder.
    if existing == path and not _written_in_place(path) and not os.access(path.parent, os.W_OK):
        _refuse(path, option, f"no permission for {path.parent}")


def write(path: Path, text: str, option: str) -> None:
    """Write a regular file as a whole or not at all; its folder is made if there is none."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _written_in_place(path):
            path.write_text(text, "utf-8")
            return
        try:
            temporary.write_text(text, "utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _refuse(path, option, error.strerror or str(error))


def _written_in_place(path: Path) -> bool:
    """Whether a file is a link, a device or a pipe, which a new file must not replace.

    /dev/stdout is such a link.
    """
    return path.is_symlink() or (path.exists() and not path.is_file())


def _refuse(path: Path, option: str, reason: str) -> NoReturn:
    raise typer.BadParameter(f"cannot write {path}: {reason}.", param_hint=option)
