"""The arrays of a TPU kernel over pages, by name."""

from typing import Any, NamedTuple


class Numbers(NamedTuple):
    """A number for each query head, over all lanes, [parts, heads of a part, LANES] each."""

    factor: Any  # of the logits
    value: Any  # of the results
    sinks: Any


class Refs(NamedTuple):
    """The arrays of a kernel."""

    table: Any
    query: Any
    cache: tuple
    numbers: Numbers
    out: Any
    lse: Any
    cursor: Any
    copied: Any
    holes: Any
    entries: Any
    blocks: tuple
    queries: Any
    results: Any
    numbers_kept: Any
    rows: Any  # of the queries, by part
    most: Any
    total: Any
    sums: Any
    offsets: Any  # from the beginning of a block to the position of each column
    own: Any  # packed: inf for a row's own columns, -inf for the others
    ordered: tuple  # apart: keys and values by head
    strange: Any  # packed, several heads: above 0 where a result was NaN or infinite
    again: Any  # and whether one was
    table_arrived: Any
    pages_arrived: Any
    queries_arrived: Any
    results_left: Any
    numbers_left: Any
