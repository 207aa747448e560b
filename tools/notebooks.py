"""Writes the notebooks of examples/ from its scripts, without outputs.

python tools/notebooks.py            write them
python tools/notebooks.py --check    exit with status 1 if one is not what its script gives

The docstring of a script becomes a text cell, each definition a cell, and the body of `main` a cell
for each of its paragraphs.
"""

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = ("train_gpt", "gated_linear_attention")
OPTIONS = 'import sys\n\nsys.argv[1:] = []  # options of the script, as in ["--size", "full"]'


def paragraphs(lines: list[str], statements: list[ast.stmt], start: int) -> Iterator[str]:
    """The source of statements from line `start` on: a new paragraph after each empty line."""
    paragraph: list[str] = []
    for statement in statements:
        end = statement.end_lineno or statement.lineno
        source = lines[start - 1 : end]
        if not source[0].strip() and paragraph:
            yield "\n".join(paragraph)
            paragraph = []
        paragraph += [line for i, line in enumerate(source) if line.strip() or paragraph or i]
        start = end + 1
    yield "\n".join(paragraph)


def cells(source: str) -> Iterator[tuple[str, str]]:
    """The kind and the text of each cell."""
    docstring, *statements = ast.parse(source).body
    *statements, main, _ = statements  # the last one calls main
    if not isinstance(main, ast.FunctionDef) or main.name != "main":
        raise ValueError("a script must end with main() and its call.")
    title, _, text = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    yield "markdown", f"# {title.removesuffix('.')}\n{text}"
    yield "code", OPTIONS
    lines = source.splitlines()
    last = [x for x in statements if isinstance(x, ast.Import | ast.ImportFrom)][-1].end_lineno or 0
    yield "code", "\n".join(lines[docstring.end_lineno or 0 : last]).strip("\n")
    statements = [x for x in statements if x.lineno > last]
    for paragraph in paragraphs(lines, statements, last + 1):
        yield "code", paragraph.strip("\n")
    dedented = [line.removeprefix("    ") for line in lines]
    for paragraph in paragraphs(dedented, main.body, main.lineno + 1):
        yield "code", paragraph.strip("\n")


def notebook(source: str) -> str:
    """The notebook of a script, as JSON."""
    made = []
    for i, (kind, text) in enumerate(cells(source)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{i}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        made.append(cell | {"source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    content = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = 0
    for name in NOTEBOOKS:
        path = EXAMPLES / f"{name}.ipynb"
        wanted = notebook(path.with_suffix(".py").read_text())
        if check and (not path.exists() or path.read_text() != wanted):
            print(f"{path.name} is not what {name}.py gives: run python tools/notebooks.py")
            stale += 1
        elif not check:
            path.write_text(wanted)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
