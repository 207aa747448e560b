"""Attention over pages among what is compared: decoding, 32 heads of 128 on 8 key heads, bfloat16.

Counted for each MiB of keys and values, on the way of a block that is there and seen as a whole.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from tpu_parts import PEERS, Part, Subject, array

HEADS, KV_HEADS, WIDTH = 32, 8, 128
SEQUENCES, PER_SEQUENCE, PAGES_IN_ALL, PAGE = 64, 512, 16384, 16
_TOKEN = 2 * KV_HEADS * WIDTH * 2  # bytes of keys and values
_OURS = 2**21 // _TOKEN // PAGE  # pages of a block
_WRITTEN_OUT = 8  # copies of ours without a loop


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return array(*shape, dtype=jnp.int32)


def _query() -> jax.ShapeDtypeStruct:
    return array(SEQUENCES, HEADS, WIDTH)


def _ours() -> Any:
    from ejkernel.modules import page_attention

    pages = array(PAGES_IN_ALL, PAGE, KV_HEADS, WIDTH)
    sequences = (_integers(SEQUENCES), _integers(SEQUENCES, PER_SEQUENCE))
    run = functools.partial(page_attention, platform="pallas")
    return lambda x: run(*x), (_query(), pages, pages, *sequences)


def _combined() -> Any:
    """Keys and values in one array, and what tells the sequences apart."""
    pages = array(PAGES_IN_ALL, PAGE, 2 * KV_HEADS, WIDTH)
    table = _integers(SEQUENCES, PER_SEQUENCE)
    return _query(), pages, _integers(SEQUENCES), table, _integers(SEQUENCES + 1), _integers(1)


def _ours_combined() -> Any:
    from ejkernel.modules import ragged_page_attention_v2

    run = functools.partial(ragged_page_attention_v2, platform="pallas")
    return lambda x: run(*x), _combined()


def _jax_ragged(pages: int) -> Any:
    peer = importlib.import_module(PEERS + "ragged_paged_attention")
    run = functools.partial(
        peer.ragged_paged_attention,
        sm_scale=WIDTH**-0.5,
        num_kv_pages_per_block=pages,
        num_queries_per_block=1,
    )
    return lambda x: run(*x), _combined()


def _jax_paged(pages: int) -> Any:
    peer = importlib.import_module(PEERS + "paged_attention")
    cache = array(KV_HEADS, PAGES_IN_ALL, PAGE, WIDTH)
    run = functools.partial(peer.paged_attention, pages_per_compute_block=pages)
    sequences = (_integers(SEQUENCES), _integers(SEQUENCES, PER_SEQUENCE))
    return lambda x: run(*x), (_query(), cache, cache, *sequences)


def _block(pages: int, heads: int = KV_HEADS, copies: tuple[int, int] = (0, 1)) -> dict[str, Part]:
    """A block of so many pages, of so many key heads."""
    mebibytes = pages * PAGE * _TOKEN * heads / KV_HEADS / 2**20
    return {"block": Part({0: 1}, mebibytes, copies=copies)}


_MINE = _block(_OURS, copies=(0, _OURS // _WRITTEN_OUT))


def _ragged(pages: int) -> Subject:
    return Subject(lambda: _jax_ragged(pages), _block(pages))


PAGES: dict[str, Subject] = {
    "pages.ours": Subject(_ours, _MINE, "one_query"),
    # One key head in a step. The longest scalar block sets out on a sequence's first block.
    "pages.jax_paged_512": Subject(lambda: _jax_paged(32), _block(32, heads=1, copies=(1, 1))),
    "pages.jax_ragged_512": _ragged(32),
    "pages.jax_ragged_1024": _ragged(64),
    "pages_combined.ours": Subject(_ours_combined, _MINE, "one_query"),
    "pages_combined.jax_ragged_512": _ragged(32),
    "pages_combined.jax_ragged_1024": _ragged(64),
}
