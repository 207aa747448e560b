"""Tile shapes, warps and stages of the paged kernels: the heuristic and the tuner's candidates."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ejkernel.kernels.common.paged import cache_axes
from ejkernel.kernels.common.triton.bridge import grid_multiprocessors, padded_size
from ejkernel.kernels.ragged_page_attention_v3.config import PagedConfig
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Spec
from ejkernel.ops.platform import Device

MAX_ROWS = 128


@runtime_checkable
class PagedGpuConfig(Protocol):
    """The fields of a configuration that the kernels read, in every op over pages."""

    @property
    def num_warps(self) -> int: ...

    @property
    def num_stages(self) -> int: ...

    @property
    def pages_per_block(self) -> int | None: ...

    @property
    def queries_per_block(self) -> int | None: ...


class CacheSizes(NamedTuple):
    """The sizes of a cache."""

    pages: int
    page_size: int
    kv_heads: int


class PagedTileConfig(NamedTuple):
    """Tile shape, compiler options and grid size of the attention kernel."""

    prefill_rows: int  # rows of a tile for sequences with many queries; 0: all are decode
    block_k: int
    num_warps: int
    num_stages: int
    programs: int


class PagedTilePreset(NamedTuple):
    """A config before the device is known."""

    prefill_rows: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


# Keyed by the padded head dim, or value dim if that is larger.
_Table = dict[int, list[PagedTilePreset]]

# Decode: few queries for each sequence, on Hopper and Blackwell.
_DECODE: _Table = {
    64: [PagedTilePreset(0, 128, 4, 3, 2), PagedTilePreset(0, 64, 4, 4, 3)],
    128: [PagedTilePreset(0, 64, 4, 4, 2), PagedTilePreset(0, 128, 4, 3, 1)],
    256: [PagedTilePreset(0, 32, 4, 4, 2), PagedTilePreset(0, 64, 4, 3, 1)],
}
# Three programs per multiprocessor, where registers suffice: fastest for short items.
_DECODE_THREE_PROGRAMS = PagedTilePreset(0, 64, 4, 3, 3)
# An 8-bit cache: half the shared memory and half the bytes for the same arithmetic.
_EIGHT_BIT_DECODE: _Table = {
    64: [PagedTilePreset(0, 128, 4, 3, 2), PagedTilePreset(0, 64, 4, 4, 3)],
    128: [PagedTilePreset(0, 128, 4, 3, 2), PagedTilePreset(0, 64, 4, 4, 3)],
    256: [PagedTilePreset(0, 32, 4, 4, 2), PagedTilePreset(0, 64, 4, 3, 2)],
}
# Mixed: some sequences have many queries.
_MIXED: _Table = {
    64: [PagedTilePreset(128, 64, 8, 3, 1), PagedTilePreset(64, 64, 4, 2, 2)],
    128: [PagedTilePreset(128, 64, 8, 3, 1), PagedTilePreset(64, 64, 4, 2, 2)],
    256: [PagedTilePreset(64, 64, 8, 2, 1), PagedTilePreset(64, 32, 8, 2, 1)],
}
_EIGHT_BIT_MIXED: _Table = {
    64: [PagedTilePreset(128, 64, 8, 2, 1)],
    128: [PagedTilePreset(64, 64, 4, 2, 2), PagedTilePreset(64, 32, 4, 2, 2)],
    256: [PagedTilePreset(32, 32, 4, 2, 1)],
}
# Blackwell, where the others spill registers.
_BLACKWELL_MIXED: _Table = {
    64: [PagedTilePreset(128, 64, 8, 3, 1)],
    128: [PagedTilePreset(128, 64, 8, 3, 1)],
    256: [PagedTilePreset(32, 64, 8, 2, 1)],
}
# Only without extra features and with few pages per tile: else registers spill.
_LARGEST_MIXED = PagedTilePreset(128, 128, 8, 3, 1)
# Ampere, and devices with less shared memory.
_SMALL_DECODE: _Table = {
    64: [PagedTilePreset(0, 64, 4, 3, 2)],
    128: [PagedTilePreset(0, 32, 4, 3, 2)],
    256: [PagedTilePreset(0, 16, 4, 3, 2)],
}
_SMALL_MIXED: _Table = {
    64: [PagedTilePreset(64, 32, 4, 2, 1)],
    128: [PagedTilePreset(64, 32, 4, 2, 1)],
    256: [PagedTilePreset(32, 32, 8, 2, 1)],
}
_SMALL_EIGHT_BIT_MIXED = _SMALL_MIXED | {128: [PagedTilePreset(64, 32, 8, 2, 1)]}
# float32 in full precision does not use tensor cores.
_FLOAT32_DECODE: _Table = {
    64: [PagedTilePreset(0, 32, 4, 2, 2)],
    128: [PagedTilePreset(0, 16, 4, 2, 2)],
    256: [PagedTilePreset(0, 16, 4, 2, 1)],
}
_FLOAT32_AMPERE = PagedTilePreset(
    0, 32, 4, 2, 1
)  # where the preset of Hopper would spill, at head dims up to 128
_FLOAT32_MIXED: _Table = {
    64: [PagedTilePreset(32, 32, 8, 2, 1)],
    128: [PagedTilePreset(16, 16, 8, 2, 1)],
    256: [PagedTilePreset(16, 16, 16, 2, 1)],
}


def capability(device: Device) -> tuple[int, int]:
    """The compute capability; that of Hopper where it is unknown."""
    return device.compute_capability or (9, 0)


def values_of(inputs: Inputs) -> Any:
    """The array that holds the values."""
    return inputs.key_pages if inputs.value_pages is None else inputs.value_pages


def cache_sizes(inputs: Inputs, spec: Spec) -> CacheSizes:
    """The sizes of the cache of a call."""
    axes = cache_axes(spec.kv_layout, combined=inputs.value_pages is None)
    return CacheSizes(*(inputs.key_pages.shape[axes.index(letter)] for letter in "pck"))


def is_decode(inputs: Inputs, spec: Spec) -> bool:
    """Whether the sequences have few queries on average; then all items have few rows."""
    group = inputs.query.shape[2] // cache_sizes(inputs, spec).kv_heads
    tokens_per_tile = max(16, padded_size(group)) // group
    return inputs.query.shape[1] <= tokens_per_tile * inputs.page_indices.shape[1]


def presets(inputs: Inputs, spec: Spec, device: Device) -> list[PagedTilePreset]:
    """Candidates for a call, the heuristic's choice first."""
    decode = is_decode(inputs, spec)
    width = max(64, padded_size(max(inputs.query.shape[3], values_of(inputs).shape[-1])))
    if np.dtype(inputs.query.dtype).itemsize == 4:
        if decode and width == 128 and capability(device) < (9, 0):
            return [_FLOAT32_AMPERE]
        return (_FLOAT32_DECODE if decode else _FLOAT32_MIXED)[width]
    eight_bits = np.dtype(inputs.key_pages.dtype).itemsize == 1
    if capability(device) not in ((9, 0), (10, 0), (10, 3)):
        mixed = _SMALL_EIGHT_BIT_MIXED if eight_bits else _SMALL_MIXED
        return (_SMALL_DECODE if decode else mixed)[width]
    special = (inputs.sinks, spec.logits_soft_cap, spec.sliding_window)
    special = (*special, None if eight_bits else inputs.k_scale)
    plain, size = all(x is None for x in special), cache_sizes(inputs, spec).page_size
    if decode:
        found = (_EIGHT_BIT_DECODE if eight_bits else _DECODE)[width]
        if width == 128 and not plain and size < 64:
            return [preset for preset in found if preset.block_k == 128]  # the others spill
        three = width == 128 and plain and size >= 64 and not eight_bits
        return [_DECODE_THREE_PROGRAMS, *found] if three else found
    hopper = capability(device) == (9, 0)
    if eight_bits:
        return _EIGHT_BIT_MIXED[width][: None if hopper else 1]
    mixed = (_MIXED if hopper else _BLACKWELL_MIXED)[width]
    if width == 128 and inputs.value_pages is None and size > 128:
        return mixed[:1]  # pages hold keys and values: the others spill
    if width == 128 and inputs.query.shape[3] < width:
        mixed = mixed[:1]  # the mask of the padded columns makes the second spill
    if plain and size % 32 == 0 and width == 128 and hopper:
        return [_LARGEST_MIXED, *mixed]
    return mixed


def configurations(inputs: Inputs, spec: Spec, device: Device) -> list[PagedConfig]:
    """The presets as public configurations of the op."""
    sizes = cache_sizes(inputs, spec)
    group = inputs.query.shape[2] // sizes.kv_heads
    fields = spec.config.__dataclass_fields__
    found = []
    for preset in presets(inputs, spec, device):
        pages = _pages_per_block(preset, sizes)
        values: dict[str, Any] = {
            "num_warps": preset.num_warps,
            "num_stages": preset.num_stages,
        }
        if "pages_per_compute_block" in fields:
            values["pages_per_compute_block"] = pages
        else:
            values["num_kv_pages_per_block"] = pages
            values["num_queries_per_block"] = max(1, preset.prefill_rows // group)
        found.append(spec.config(**values))
    return list(dict.fromkeys(found))


def _pages_per_block(preset: PagedTilePreset, sizes: CacheSizes) -> int:
    return max(1, preset.block_k // sizes.page_size)


def tile_config(
    inputs: Inputs, spec: Spec, params: PagedGpuConfig, device: Device
) -> PagedTileConfig:
    """The config of a call: what `params` gives, padded to a tile; the rest by the heuristic."""
    sizes = cache_sizes(inputs, spec)
    group = inputs.query.shape[2] // sizes.kv_heads
    known = presets(inputs, spec, device)
    options = (params.num_warps, params.num_stages)
    rows, block_k = known[0].prefill_rows, known[0].block_k
    if (pages := params.pages_per_block) is not None:
        # A tile may be smaller than a page: then the preset is identified by its other fields.
        meant = [
            preset.block_k
            for preset in known
            if (_pages_per_block(preset, sizes), preset.num_warps, preset.num_stages)
            == (pages, *options)
        ]
        largest = max(preset.block_k for preset in known)
        block_k = meant[0] if meant else min(largest, padded_size(pages * sizes.page_size))
    if rows and params.queries_per_block is not None:
        rows = min(MAX_ROWS, padded_size(params.queries_per_block * group))
    rows = max(rows, 16, padded_size(group)) if rows else 0
    given = (rows, block_k, *options)
    resident = [x.programs_per_multiprocessor for x in known if x[:4] == given]
    multiprocessors = grid_multiprocessors(device)
    programs = multiprocessors * (resident[0] if resident else 1)
    b, s = inputs.page_indices.shape[:2]
    if splits := getattr(params, "num_splits", 0):
        programs = min(8 * multiprocessors, b * s * sizes.kv_heads * splits)
    return PagedTileConfig(rows, block_k, *options, programs)
