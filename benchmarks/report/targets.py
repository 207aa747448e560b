"""Figures that have a target: what was measured, what it must reach, and whether it does."""

from benchmarks.report import results
from ejkernel.cli.report.rows import Row, amount, target

MISSED = "**missed**"


def of_file(name: str) -> list[Row]:
    """The figures of a file that `ejkernel bench` or a script has written."""
    return list(results.rows_of(name))


def of_grouped_matmul() -> list[Row]:
    """The rates of grouped matmul on an H200 that have a target."""
    return [row for row in results.rows_of("h200/grouped_matmul") if row.bound is not None]


def line(row: Row) -> list[str]:
    """A figure in a table."""
    bound = "" if row.bound is None else target(row.bound, row.better, row.unit)
    verdict = {None: "", True: "met", False: MISSED}[row.met]
    what = row.what if row.direction is None else f"{row.what}, {row.direction}"
    return [what, amount(row.ours and row.ours.value, row.unit), bound, verdict]


def table(rows: list[Row]) -> str:
    """Figures in Markdown."""
    return results.table(["figure", "measured", "target", "result"], [line(row) for row in rows])


def summary() -> str:
    """How many targets are met, and which are missed."""
    groups = {
        "CPU": of_file("cpu"),
        "H200, `grouped_matmul`": of_grouped_matmul(),
        "H200, `ragged_page_attention_v3`": of_file("h200/ragged_page_attention_v3"),
        "TPU, static schedules": of_file("tpu_schedule"),
        "TPU, compilation": of_file("tpu_shapes"),
    }
    judged = [(group, x) for group, found in groups.items() for x in found if x.met is not None]
    missed = [(group, x) for group, x in judged if not x.met]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} targets are met."]
    if missed:
        lines += [f"{len(missed)} missed:", ""]
        for group, row in missed:
            what, measured, bound, _ = line(row)
            lines.append(f"- {group}: {what}: {measured}, target {bound}")
    return "\n".join(lines)
