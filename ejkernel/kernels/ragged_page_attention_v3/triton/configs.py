"""Tiles and launch parameters of the Triton kernels: what is guessed, what is worth timing."""

from typing import Any, NamedTuple

import numpy as np

from ejkernel.kernels.common.paged import cache_axes
from ejkernel.kernels.common.triton.bridge import grid_multiprocessors
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Spec
from ejkernel.ops.platform import Device

MOST_ROWS = 128


class Sizes(NamedTuple):
    """The sizes of a cache."""

    pages: int
    page_size: int
    kv_heads: int


class Shape(NamedTuple):
    """Tiles and launch parameters."""

    rows: int  # of a tile of a sequence with many queries; 0: there are none of those
    block_k: int
    warps: int
    stages: int
    programs: int


class Guess(NamedTuple):
    """A shape before the call and the device are known: programs of one multiprocessor."""

    rows: int
    block_k: int
    warps: int
    stages: int
    resident: int


# By the width of the head, or of the value if that is wider.
_Table = dict[int, list[Guess]]

# Few queries for each sequence, on Hopper and Blackwell.
_DECODE: _Table = {
    64: [Guess(0, 128, 4, 3, 2), Guess(0, 64, 4, 4, 3)],
    128: [Guess(0, 64, 4, 4, 2), Guess(0, 128, 4, 3, 1)],
    256: [Guess(0, 32, 4, 4, 2), Guess(0, 64, 4, 3, 1)],
}
# Three programs of a multiprocessor, where registers suffice: best where items are short.
_CROWDED = Guess(0, 64, 4, 3, 3)
# A cache of eight bits: half the shared memory, and as much work on half the bytes.
_BYTES_DECODE: _Table = {
    64: [Guess(0, 128, 4, 3, 2), Guess(0, 64, 4, 4, 3)],
    128: [Guess(0, 128, 4, 3, 2), Guess(0, 64, 4, 4, 3)],
    256: [Guess(0, 32, 4, 4, 2), Guess(0, 64, 4, 3, 2)],
}
# Sequences with many queries among them.
_MIXED: _Table = {
    64: [Guess(128, 64, 8, 3, 1), Guess(64, 64, 4, 2, 2)],
    128: [Guess(128, 64, 8, 3, 1), Guess(64, 64, 4, 2, 2)],
    256: [Guess(64, 64, 8, 2, 1), Guess(64, 32, 8, 2, 1)],
}
_BYTES_MIXED: _Table = {
    64: [Guess(128, 64, 8, 2, 1)],
    128: [Guess(64, 64, 4, 2, 2), Guess(64, 32, 4, 2, 2)],
    256: [Guess(32, 32, 4, 2, 1)],
}
# Blackwell, where others of these run out of registers.
_BLACKWELL_MIXED: _Table = {
    64: [Guess(128, 64, 8, 3, 1)],
    128: [Guess(128, 64, 8, 3, 1)],
    256: [Guess(32, 64, 8, 2, 1)],
}
# Only where a tile needs nothing but a few pages and their products: else registers run out.
_LARGEST = Guess(128, 128, 8, 3, 1)
# Ampere, and what has less shared memory.
_SMALL_DECODE: _Table = {
    64: [Guess(0, 64, 4, 3, 2)],
    128: [Guess(0, 32, 4, 3, 2)],
    256: [Guess(0, 16, 4, 3, 2)],
}
_SMALL_MIXED: _Table = {
    64: [Guess(64, 32, 4, 2, 1)],
    128: [Guess(64, 32, 4, 2, 1)],
    256: [Guess(32, 32, 8, 2, 1)],
}
_SMALL_BYTES_MIXED = _SMALL_MIXED | {128: [Guess(64, 32, 8, 2, 1)]}
# Exact float32 has no tensor cores.
_EXACT_DECODE: _Table = {
    64: [Guess(0, 32, 4, 2, 2)],
    128: [Guess(0, 16, 4, 2, 2)],
    256: [Guess(0, 16, 4, 2, 1)],
}
_EXACT_AMPERE = Guess(0, 32, 4, 2, 1)  # where that of Hopper would spill, at head dims to 128
_EXACT_MIXED: _Table = {
    64: [Guess(32, 32, 8, 2, 1)],
    128: [Guess(16, 16, 8, 2, 1)],
    256: [Guess(16, 16, 16, 2, 1)],
}


def padded(dim: int) -> int:
    """The width of a tile that holds `dim` columns."""
    return max(16, 1 << (dim - 1).bit_length())


def capability(device: Device) -> tuple[int, int]:
    """The compute capability, of a Hopper where nothing is known."""
    return device.compute_capability or (9, 0)


def values_of(inputs: Inputs) -> Any:
    """The array that holds the values."""
    return inputs.key_pages if inputs.value_pages is None else inputs.value_pages


def static_sizes(inputs: Inputs, spec: Spec) -> Sizes:
    """The sizes of the cache of a call."""
    axes = cache_axes(spec.kv_layout, combined=inputs.value_pages is None)
    return Sizes(*(inputs.key_pages.shape[axes.index(letter)] for letter in "pck"))


def is_decode(inputs: Inputs, spec: Spec) -> bool:
    """Whether the sequences have so few queries on average that all are taken as having few."""
    group = inputs.query.shape[2] // static_sizes(inputs, spec).kv_heads
    few = max(16, padded(group)) // group
    return inputs.query.shape[1] <= few * inputs.page_indices.shape[1]


def guesses(inputs: Inputs, spec: Spec, device: Device) -> list[Guess]:
    """What is worth timing for a call, the guess first."""
    decode = is_decode(inputs, spec)
    width = max(64, padded(max(inputs.query.shape[3], values_of(inputs).shape[-1])))
    if np.dtype(inputs.query.dtype).itemsize == 4:
        if decode and width == 128 and capability(device) < (9, 0):
            return [_EXACT_AMPERE]
        return (_EXACT_DECODE if decode else _EXACT_MIXED)[width]
    eight_bits = np.dtype(inputs.key_pages.dtype).itemsize == 1
    if capability(device) not in ((9, 0), (10, 0), (10, 3)):
        mixed = _SMALL_BYTES_MIXED if eight_bits else _SMALL_MIXED
        return (_SMALL_DECODE if decode else mixed)[width]
    special = (inputs.sinks, spec.logits_soft_cap, spec.sliding_window)
    special = (*special, None if eight_bits else inputs.k_scale)
    plain, size = all(x is None for x in special), static_sizes(inputs, spec).page_size
    if decode:
        few = (_BYTES_DECODE if eight_bits else _DECODE)[width]
        if width == 128 and not plain and size < 64:
            return [guess for guess in few if guess.block_k == 128]  # others lack registers
        crowded = width == 128 and plain and size >= 64 and not eight_bits
        return [_CROWDED, *few] if crowded else few
    hopper = capability(device) == (9, 0)
    if eight_bits:
        return _BYTES_MIXED[width][: None if hopper else 1]
    mixed = (_MIXED if hopper else _BLACKWELL_MIXED)[width]
    if width == 128 and inputs.value_pages is None and size > 128:
        return mixed[:1]  # tiles within pages of keys and values: others lack registers
    if width == 128 and inputs.query.shape[3] < width:
        mixed = mixed[:1]  # the second lacks some for which columns there are
    if plain and size % 32 == 0 and width == 128 and hopper:
        return [_LARGEST, *mixed]
    return mixed


def configurations(inputs: Inputs, spec: Spec, device: Device) -> list[Any]:
    """The guesses as configurations of the op."""
    sizes = static_sizes(inputs, spec)
    group = inputs.query.shape[2] // sizes.kv_heads
    fields = spec.config.__dataclass_fields__
    found = []
    for guess in guesses(inputs, spec, device):
        pages = _pages(guess, sizes)
        values: dict[str, Any] = {"num_warps": guess.warps, "num_stages": guess.stages}
        if "pages_per_compute_block" in fields:
            values["pages_per_compute_block"] = pages
        else:
            values["num_kv_pages_per_block"] = pages
            values["num_queries_per_block"] = max(1, guess.rows // group)
        found.append(spec.config(**values))
    return list(dict.fromkeys(found))


def _pages(guess: Guess, sizes: Sizes) -> int:
    return max(1, guess.block_k // sizes.page_size)


def shape_of(inputs: Inputs, spec: Spec, params: Any, device: Device) -> Shape:
    """What was asked for, in sizes that a tile can have; the rest as guessed."""
    sizes = static_sizes(inputs, spec)
    group = inputs.query.shape[2] // sizes.kv_heads
    known = guesses(inputs, spec, device)
    launch = (params.num_warps, params.num_stages)
    rows, block_k = known[0].rows, known[0].block_k
    if (pages := params.pages_per_block) is not None:
        # A tile may be less than a page: then the guess that was meant is found by the rest.
        meant = [
            guess.block_k
            for guess in known
            if (_pages(guess, sizes), guess.warps, guess.stages) == (pages, *launch)
        ]
        largest = max(guess.block_k for guess in known)
        block_k = meant[0] if meant else min(largest, padded(pages * sizes.page_size))
    if rows and params.queries_per_block is not None:
        rows = min(MOST_ROWS, padded(params.queries_per_block * group))
    rows = max(rows, 16, padded(group)) if rows else 0
    asked = (rows, block_k, *launch)
    resident = next((guess.resident for guess in known if guess[:4] == asked), 1)
    programs = grid_multiprocessors(device) * resident
    b, s = inputs.page_indices.shape[:2]
    if splits := getattr(params, "num_splits", 0):
        programs = min(8 * grid_multiprocessors(device), b * s * sizes.kv_heads * splits)
    return Shape(rows, block_k, params.num_warps, params.num_stages, programs)
