"""Arrays of random calls, drawn by NumPy from a seed: the same on every machine.

The programs that `ejkernel check --random` prints make their arrays with these functions.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

_REDRAW: contextvars.ContextVar[int] = contextvars.ContextVar("redraw", default=0)
_NAN_FILLED: contextvars.ContextVar[bool] = contextvars.ContextVar("nan_filled", default=True)
_STRONG = -50.0  # the logarithm of a decay that leaves next to nothing of a state


@contextlib.contextmanager
def drawn_again(number: int, nan_filled: bool = True) -> Iterator[None]:
    """Floats drawn in this block are others for each number; `nan_where` does nothing if not
    `nan_filled`.
    """
    redraw, filled = _REDRAW.set(number), _NAN_FILLED.set(nan_filled)
    try:
        yield
    finally:
        _REDRAW.reset(redraw)
        _NAN_FILLED.reset(filled)


def normal(*shape: int, seed: int = 0, size: float = 1.0) -> np.ndarray:
    """Normal floats of this standard deviation."""
    drawn = np.random.default_rng([seed, _REDRAW.get()]).standard_normal(shape)
    return np.asarray(size * drawn, np.float32)


def uniform(*shape: int, seed: int = 0, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """Floats between these."""
    drawn = np.random.default_rng([seed, _REDRAW.get()]).uniform(low, high, shape)
    return np.asarray(drawn, np.float32)


def log_decays(*shape: int, seed: int = 0, strong: float = 0.0, none: float = 0.0) -> np.ndarray:
    """Logarithms of decays: some are -inf or -50, some 0, the others between -1 and 0."""
    rng = np.random.default_rng([seed, _REDRAW.get()])
    kind, mild = rng.uniform(size=shape), -rng.uniform(size=shape)
    extreme = np.where(kind < strong / 2, -np.inf, np.where(kind < strong, _STRONG, mild))
    return np.where(kind > 1 - none, 0.0, extreme).astype(np.float32)


def boolean(*shape: int, seed: int = 0, chance: float = 0.5) -> np.ndarray:
    """Independent booleans, True with this chance."""
    return np.random.default_rng(seed).uniform(size=shape) < chance


def integers(
    *shape: int, seed: int = 0, low: int = 0, high: int = 2, dtype: str = "int32"
) -> np.ndarray:
    """Integers from `low` up to, not including, `high`."""
    return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)


def segment_ids(
    batch: int, length: int, seed: int = 0, documents: int = 2, padding: int = 0
) -> np.ndarray:
    """Ids of documents in the order of their numbers, some perhaps empty; -1 for the padding."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(0, documents, (batch, length)), axis=1)
    tokens = length - rng.integers(0, min(padding, length) + 1, (batch, 1))
    return np.where(np.arange(length) < tokens, ids, -1).astype(np.int32)


def page_table(
    sequences: int, entries: int, pages: int, seed: int = 0, holes: float = 0.0
) -> np.ndarray:
    """A table of different pages in no order, -1 with the chance of a hole."""
    rng = np.random.default_rng(seed)
    table = rng.permutation(pages)[: sequences * entries].reshape(sequences, entries)
    return np.where(rng.uniform(size=table.shape) < holes, -1, table).astype(np.int32)


def unused_slots(
    table: ArrayLike, lengths: Sequence[int], pages: int, page_size: int
) -> np.ndarray:
    """The slots `[pages, page_size]` in which no sequence of these lengths has a token."""
    unused = np.ones((pages, page_size), bool)
    for row, length in zip(np.asarray(table), lengths, strict=True):
        for position in range(length):
            if (page := row[position // page_size]) >= 0:
                unused[page, position % page_size] = False
    return unused


def nan_where(where: ArrayLike, x: np.ndarray) -> np.ndarray:
    """`x` with NaN in places that must not be read."""
    if not _NAN_FILLED.get():
        return x
    return np.where(where, np.float32(np.nan), x)
