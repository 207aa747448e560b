"""The recorded run of `ejkernel demo`: every operation against plain JAX."""

from typing import Any

from benchmarks.report import results

# Why an operation may be slower than plain JAX on a CPU.
_REASONS = {
    "gla_attention": "a `lax.scan` over 1024 tokens keeps its state in cache, and the chunked form "
    "does more arithmetic",
    "lightning_attention": "for the same reason",
    "recurrent_attention": "for the same reason",
    "mean_pooling": "both read the array once, and ours sums block by block for accuracy",
}
_HEADER = ["operation", "platform", "error / allowed", "forward", "gradient", "memory"]


def _rows() -> dict[str, dict[str, Any]]:
    result = results.load("demo")
    return result["rows"] if result else {}


def table() -> str:
    """Time, speed and memory of every operation; speed and memory relative to plain JAX."""
    rows = [
        [
            f"`{name}`",
            row["platforms"][0],
            f"{100 * row['error'] / row['allowed']:.0f}%",
            f"{1e3 * row['seconds']:.3g} ms, {row['speedup']:.2g}x",
            f"{1e3 * row['gradient_seconds']:.3g} ms, {row['gradient_speedup']:.2g}x",
            f"{row['memory']:.2g}x",
        ]
        for name, row in _rows().items()
    ]
    return results.table(_HEADER, rows, numbers=4)


def slower() -> str:
    """Which operations are slower than plain JAX, by how much and why."""
    rows = _rows()
    if not rows:
        return "`make demo` has no recorded run."
    forward = [f"`{x}` ({row['speedup']:.2f}x)" for x, row in rows.items() if row["speedup"] < 1]
    gradient = [x for x, row in rows.items() if row["gradient_speedup"] < 1]
    unexplained = [x for x in (*gradient, *(y.split("`")[1] for y in forward)) if x not in _REASONS]
    compared = (
        f"the {len(rows)} operations that `make demo` compares with plain JAX on two CPU cores"
    )
    if not forward and not gradient:
        return f"None of {compared} is slower, in the forward pass or with gradients."
    if unexplained:
        raise LookupError(f"no reason is written down for {', '.join(unexplained)}")
    with_gradients = ", ".join(f"`{x}`" for x in gradient) or "none"
    reasons = "; ".join(
        f"`{x}`: {reason}" for x, reason in _REASONS.items() if rows[x]["speedup"] < 1
    )
    return (
        f"Of {compared}, "
        f"{len(forward) or 'none'} {'is' if len(forward) == 1 else 'are'} slower in the forward "
        + (f"pass ({', '.join(forward)})" if forward else "pass")
        + f" and {with_gradients} with gradients. {reasons}."
    )
