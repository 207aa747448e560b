"""Count what makes a tree hard to read: duplicates, private names across files, missing types.

    python tools/code_metrics.py [--list]

| measure | what counts |
|---|---|
| identical bodies | functions of at least 60 characters with the same body in two files |
| equal passages | pairs of six equal lines in a row, without signatures, imports, docstrings |
| private names | `_name` of another file, imported or an attribute of anything but self |
| untyped | parameters without a type, or of type Any |
"""

import argparse
import ast
import collections
import itertools
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "ejkernel").rglob("*.py"))
PASSAGE = 6
SMALLEST_BODY = 60  # characters

# Public in spite of their names: of NamedTuples and dataclasses.
_PUBLIC = {"_replace", "_fields", "_field_defaults", "_asdict", "_make"}
Functions = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> list[Functions]:
    return [node for node in ast.walk(tree) if isinstance(node, Functions)]


def _body(function: Functions) -> list[ast.stmt]:
    first = function.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return function.body[1:] if has_docstring else function.body


def identical_bodies() -> list[str]:
    """Groups of functions in several files that have the same statements."""
    found = collections.defaultdict(set)
    for path in FILES:
        for function in functions(ast.parse(path.read_text())):
            text = "\n".join(map(ast.unparse, _body(function)))
            if len(text) >= SMALLEST_BODY:
                found[text].add(f"{path.relative_to(ROOT)}:{function.name}")
    several = lambda places: len({place.partition(":")[0] for place in places}) > 1
    return [" = ".join(sorted(places)) for places in found.values() if several(places)]


def _code_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a file that are neither empty nor comment, import, docstring or signature."""
    text = path.read_text()
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        if is_import or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            skipped.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, Functions):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            is_stub = ast.unparse(node.body[0]) == "..."
            skipped.update(range(first, node.body[0].lineno + is_stub))
    lines = ((i, line.strip()) for i, line in enumerate(text.splitlines(), 1))
    return [(i, x) for i, x in lines if x and not x.startswith("#") and i not in skipped]


def equal_passages() -> list[str]:
    """Pairs of places with six equal lines in a row; a longer passage counts once for each line."""
    found = collections.defaultdict(list)
    for path in FILES:
        lines = _code_lines(path)
        for start in range(len(lines) - PASSAGE + 1):
            passage = tuple(text for _, text in lines[start : start + PASSAGE])
            if sum(map(len, passage)) > 60:  # more than closing brackets
                found[passage].append(f"{path.relative_to(ROOT)}:{lines[start][0]}")
    pairs = (itertools.combinations(places, 2) for places in found.values())
    return [" = ".join(pair) for pair in itertools.chain(*pairs)]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC


def _own_names(tree: ast.AST) -> set[str]:
    """What a file defines: functions, classes, variables, attributes of self, fields."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, Functions | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
    return own


def private_names() -> list[str]:
    """Uses of private names of other files of the package."""
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    ours = set().union(*map(_own_names, trees.values()))
    found = []
    for path, tree in trees.items():
        own = _own_names(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom | ast.Attribute):
                continue
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ejkernel"):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and node.attr in ours - own:
                of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                names = [] if of_self else [node.attr]
            found += [
                f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
                for name in names
                if _is_private(name)
            ]
    return found


def parameters() -> tuple[list[str], int]:
    """Parameters without a type or of type Any, and how many parameters there are."""
    untyped, count = [], 0
    for path in FILES:
        for function in functions(ast.parse(path.read_text())):
            given = function.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            every += [x for x in (given.vararg, given.kwarg) if x]
            for parameter in every:
                if parameter.arg in ("self", "cls"):
                    continue
                count += 1
                annotation = parameter.annotation
                if annotation is None or ast.unparse(annotation) in ("Any", "Any | None"):
                    where = f"{path.relative_to(ROOT)}:{function.lineno}"
                    untyped.append(f"{where}: {function.name}({parameter.arg})")
    return untyped, count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="show every place")
    listed = parser.parse_args().list
    untyped, count = parameters()
    share = 100 * len(untyped) / count
    for what, places, extra in (
        ("identical bodies", identical_bodies(), ""),
        ("equal passages of six lines", equal_passages(), ""),
        ("private names of other files", private_names(), ""),
        ("parameters untyped or Any", untyped, f" of {count}, {share:.1f} %"),
    ):
        print(f"{what}: {len(places)}{extra}")
        if listed:
            print(*(f"    {place}" for place in places), sep="\n")


if __name__ == "__main__":
    main()
