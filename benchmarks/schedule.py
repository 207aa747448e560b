"""Compares the schedules of TPU kernels, ours and their peers', without a TPU.

    PYTHONPATH=.venv/tpu .venv/bin/python benchmarks/schedule.py                  print
    PYTHONPATH=.venv/tpu .venv/bin/python benchmarks/schedule.py --json FOLDER    and keep
    ... --generations v5e v6e --only grouped

With `--json` the rows replace those of the same name in the file, if there is one.
libtpu compiles for chips that are not there and writes down what it made. Numbers are for a tile of
512 x 512 (grouped matmul: x 512) and one whole step of the grid, over pages for a MiB of keys and
values; `tpu_bundles.py` says how they are counted. No step counts for less than its matrix unit
needs. `make test-tpu` installs libtpu.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

_BOUNDS = {"v5e": 0.92, "v6e": 0.97}


def compile_here(subject: str, generation: str) -> None:
    """In a process of its own: libtpu reads where to write when it is loaded."""
    from tpu.ahead_of_time import compiled
    from tpu_subjects import SUBJECTS

    compiled(generation, *SUBJECTS[subject].build())


def measured(subject: str, generation: str) -> list[dict[str, Any]]:
    """A row for each part of a subject."""
    from tpu_bundles import schedules, vmem
    from tpu_subjects import SUBJECTS

    with tempfile.TemporaryDirectory() as folder:
        arguments = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = {**os.environ, "LIBTPU_INIT_ARGS": arguments, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, __file__, "--compile", subject, generation],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{subject} for {generation}: {done.stderr[-2000:]}")
        kernels = [x for x in schedules(Path(folder)) if SUBJECTS[subject].kernel in x.name]
        held = max(vmem(Path(folder), x.name) for x in kernels)
    if len(kernels) != 1:
        raise RuntimeError(f"{subject} has {len(kernels)} kernels: {[x.name for x in kernels]}")
    name, whose = subject.split(".")
    return [
        {
            "workload": name,
            "part": part,
            "kernel": whose,
            "generation": generation,
            **costs(kernels[0], chosen),
            "vmem_mib": round(held / 2**20, 2),
        }
        for part, chosen in SUBJECTS[subject].parts.items()
    ]


def costs(schedule: Any, part: Any) -> dict[str, float]:
    """What one tile takes: the work on it, and its share of the rest of the step."""
    tiles = [(schedule.tiles[number], times) for number, times in part.blocks.items()]
    blocks = [(schedule.blocks[i], times) for i, times in tiles]
    blocks += [(block, part.ends) for block in schedule.ends()]
    total = lambda value: sum(times * value(block) for block, times in blocks)
    own = total(lambda block: block.bundles)
    if part.copies:
        rest = sum(schedule.round(i, *part.copies) for i, _ in tiles)
    elif part.steps == 1:
        rest = schedule.overhead(sorted(i for i, _ in tiles))
    else:
        rest = sum(times * schedule.overhead([i]) for i, times in tiles)
    floor = total(lambda block: block.used["mxu"]) / schedule.matrix_units
    bundles = max(own + rest, floor)
    counts = {
        unit: round(total(lambda block, unit=unit: block.used[unit]) / part.units)
        for unit in ("loads", "stores", "fills", "spills")
    }
    return {
        "bundles": round(bundles / part.units),
        "of_them_tile": round(own / part.units),
        "matrix_share": round(floor / bundles, 3),
        **counts,
    }


def figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures that have a target: each a ratio of ours to the best peer."""
    found = []
    traffic = "vector loads and stores"
    for generation in dict.fromkeys(row["generation"] for row in rows):
        here = [row for row in rows if row["generation"] == generation]
        full, bound = ("flash_512x512", "full"), _BOUNDS.get(generation, 1.0)
        moves = lambda row: row["loads"] + row["stores"]
        bundles = lambda row: row["bundles"]
        for name, what, which, value, limit in (
            ("flash", "flash forward, full tile of 512 x 512: bundles", [full], bundles, bound),
            (
                "flash_best",
                "flash forward, full tile, each kernel at its best block sizes: bundles",
                [full, ("flash_512x1024", "full"), ("flash_1024x1024", "full")],
                bundles,
                1.0,
            ),
            (
                "flash_moves",
                f"flash forward, full tile of 512 x 512: {traffic}",
                [full],
                moves,
                1.0,
            ),
            (
                "flash_default_moves",
                f"flash forward, full tile of 1024 x 1024 (the default): {traffic}",
                [("flash_1024x1024", "full")],
                moves,
                1.0,
            ),
            (
                "flash_partial",
                "flash forward, causal tile: bundles",
                [("flash_causal", "partial")],
                bundles,
                1.0,
            ),
            (
                "flash_backward",
                "flash backward, full tile: bundles",
                [("flash_backward", "full")],
                bundles,
                1.1,
            ),
            (
                "flash_backward_moves",
                f"flash backward, full tile: {traffic}",
                [("flash_backward", "full")],
                moves,
                1.0,
            ),
            (
                "grouped",
                "grouped matmul, k = 512: bundles",
                [("grouped_512", "full")],
                bundles,
                1.0,
            ),
            (
                "grouped_deep",
                "grouped matmul, k = 4096: bundles",
                [("grouped_4096", "full")],
                bundles,
                1.0,
            ),
            (
                "grouped_moves",
                f"grouped matmul, k = 4096: {traffic}",
                [("grouped_4096", "full")],
                moves,
                1.0,
            ),
            (
                "grouped_gradient",
                "grouped matmul, gradient of the weights: bundles",
                [("grouped_gradient", "full")],
                bundles,
                1.0,
            ),
            (
                "pages",
                "paged decode: bundles per MiB of keys and values",
                [("pages", "block")],
                bundles,
                0.75,
            ),
            (
                "pages_combined",
                "paged decode, keys and values in one array: bundles per MiB",
                [("pages_combined", "block")],
                bundles,
                0.75,
            ),
            (
                "pages_moves",
                f"paged decode, keys and values in one array: {traffic}",
                [("pages_combined", "block")],
                moves,
                1.0,
            ),
        ):
            mine, others = [], []
            for row in here:
                if (row["workload"], row["part"]) in which:
                    (mine if row["kernel"] == "ours" else others).append(value(row))
            if mine and others:
                ratio = round(min(mine) / min(others), 3)
                found.append(
                    {
                        "name": f"{generation}_{name}",
                        "what": f"{generation}: {what}, relative to the best peer",
                        "value": ratio,
                        "unit": "x",
                        "better": "lower",
                        "bound": limit,
                        "holds": ratio <= limit,
                    }
                )
    return found


def keep(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the rows to a file, with those that it has of others; all figures that they give."""
    from ejkernel.cli.provenance import provenance

    which = lambda row: tuple(row[x] for x in ("workload", "part", "kernel", "generation"))
    known = json.loads(path.read_text())["schedules"] if path.exists() else []
    merged = list({which(row): row for row in (*known, *rows)}.values())
    judged = figures(merged)
    result = {
        **provenance("no TPU: static schedules of libtpu, the compiler for TPUs"),
        "figures": judged,
        "schedules": merged,
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    return judged


def main() -> None:
    from tpu_subjects import SUBJECTS

    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", nargs=2, metavar=("SUBJECT", "GENERATION"))
    parser.add_argument("--generations", nargs="+", default=["v5e", "v6e"])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names to compile")
    parser.add_argument("--json", type=Path, help="folder for tpu_schedule.json")
    options = parser.parse_args()
    if options.compile:
        compile_here(*options.compile)
        return
    rows: list[dict[str, Any]] = []
    for generation in options.generations:
        for subject in (x for x in SUBJECTS if any(part in x for part in options.only)):
            for row in measured(subject, generation):
                if not rows:
                    print(" | ".join(row))
                rows.append(row)
                print(" | ".join(map(str, row.values())), flush=True)
                if options.json:
                    keep(options.json / "tpu_schedule.json", [row])
    judged = keep(options.json / "tpu_schedule.json", []) if options.json else figures(rows)
    for figure in judged:
        verdict = "holds" if figure["holds"] else "MISSED"
        print(f"{figure['what']}: {figure['value']} (at most {figure['bound']}) {verdict}")


if __name__ == "__main__":
    main()
