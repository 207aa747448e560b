"""Writes the generated parts of the documents, or says which are not up to date."""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.report import (
    demo,
    describe,
    masks,
    matrix,
    plot,
    reference,
    results,
    scale,
    speed,
    support,
    targets,
)
from ejkernel.cli.demo_calls import BASELINES
from ejkernel.cli.report import limits
from ejkernel.kernels import OPS

README = results.ROOT / "README.md"
BENCHMARKS = results.ROOT / "docs" / "benchmarks.md"
DOCS = results.ROOT / "docs"
SCALE = DOCS / "scale.md"
IMAGES = DOCS / "images"

_CHARTS: dict[str, tuple[str, Callable[[], list[speed.Comparison]]]] = {
    "h200": ("Speed on one NVIDIA H200, bfloat16", speed.headlines),
    "h200-flash-attention": (
        "flash_attention on one NVIDIA H200, bfloat16",
        lambda: speed.charted("flash_attention"),
    ),
    "h200-grouped-matmul": (
        "grouped_matmul on one NVIDIA H200, bfloat16",
        lambda: speed.charted("grouped_matmul"),
    ),
}


def _source(name: str) -> str:
    result = results.load(name)
    return results.source(result) if result else "Not measured yet."


def _measured(name: str, body: Callable[[], str]) -> str:
    """A table under the line that says where its figures come from."""
    return f"{_source(name)}\n\n{body()}" if results.load(name) else _source(name)


def _speed(operation: str) -> str:
    return _measured(f"h200/{operation}", lambda: speed.speed_table(operation))


def _figures(name: str) -> str:
    return _measured(name, lambda: targets.table(targets.of_file(name)))


def _pages() -> str:
    return _figures("h200/ragged_page_attention_v3")


def _headlines() -> str:
    source = _source("h200/flash_attention")
    said = f"{speed.peers()} {speed.slower()} {limits.H200_IN_WORDS}"
    return f"{speed.headline_table()}\n\n{said} {source}"


def _baselines() -> str:
    """What plain JAX is for every operation, and the call of `ejkernel demo`."""
    rows = [[f"`{name}`", x.description, x.call] for name, x in BASELINES.items()]
    return results.table(["operation", "plain JAX", "call of `ejkernel demo`"], rows)


_SECTIONS: dict[Path, dict[str, Callable[[], str]]] = {
    README: {"headlines": _headlines, "matrix": matrix.matrix, "demo": demo.slower},
    BENCHMARKS: {
        "summary": targets.summary,
        "limits": lambda: limits.H200_IN_WORDS,
        "flash": lambda: _speed("flash_attention"),
        "grouped": lambda: _speed("grouped_matmul"),
        "grouped-targets": lambda: targets.table(targets.of_grouped_matmul()),
        "pages": _pages,
        "cpu": lambda: _figures("cpu"),
        "tpu-schedule": lambda: _figures("tpu_schedule"),
        "tpu-shapes": lambda: _figures("tpu_shapes"),
        "baselines": _baselines,
        "demo": lambda: _measured("demo", demo.table),
        "evidence": lambda: f"{matrix.sources()}\n\n{matrix.details()}",
    },
    SCALE: {
        "rates": scale.rates,
        "times": scale.times,
        "layers": scale.whole_model,
        "choices": scale.choices,
    },
    DOCS / "settings.md": {"variables": reference.variables},
    DOCS / "api.md": {"index": reference.index},
    **{DOCS / f"{name}.md": {"support": partial(support.table, name)} for name in OPS},
}


def _document(path: Path, sections: dict[str, Callable[[], str]]) -> str:
    """The text of a document with every generated section between its marks."""
    text = path.read_text()
    for name, write in sections.items():
        marked = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not marked.search(text):
            raise LookupError(f"{path.name} has no section {name!r}")
        body = write()
        text = marked.sub(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text)
    return text


def _recorded(name: str) -> str:
    """A result, with the words that describe its calls."""
    return json.dumps(results.load(name), indent=2, ensure_ascii=False) + "\n"


def generated() -> dict[Path, str]:
    """Every file that is written from results, and what it must hold."""
    files = {results.path(name): _recorded(name) for name in describe.NAMES if results.load(name)}
    files |= {path: _document(path, sections) for path, sections in _SECTIONS.items()}
    for name, (title, rows) in _CHARTS.items():
        for theme in plot.THEMES:
            files[IMAGES / f"{name}-{theme}.svg"] = plot.chart(title, rows(), theme)
    for theme in plot.THEMES:
        files[IMAGES / f"scale-{theme}.svg"] = scale.chart(theme)
        for name, mask in masks.drawn().items():
            files[IMAGES / f"mask-{name}-{theme}.svg"] = masks.picture(name, mask, theme)
    return files


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: python -m benchmarks.report [--check]", file=sys.stderr)
        return 2
    outdated = [
        path for path, text in generated().items() if not path.exists() or path.read_text() != text
    ]
    if arguments:
        for path in outdated:
            print(f"{path.relative_to(results.ROOT)} is not up to date: make tables")
        return int(bool(outdated))
    for path, text in generated().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
