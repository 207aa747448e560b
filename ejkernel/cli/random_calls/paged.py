"""Random calls over a cache of pages: decoding, ragged, and ragged with new tokens."""

import dataclasses

import numpy as np

from ejkernel.cli.random_calls.choices import DIMS, Choices, made, one_of, size_of

_LONGEST = (1, 2, 5, 16, 17, 40, 63, 64, 100, 130)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paged(Choices):
    """What all of them have."""

    sequences: int = size_of(1, 2, 3, 5)
    longest: int = size_of(*_LONGEST)
    page_size: int = size_of(1, 3, 4, 8, 16, 16, 32)
    spare_pages: int = one_of(0, 3)
    spare_entries: int = one_of(0, 2)  # of the table
    kv_heads: int = size_of(1, 1, 2, 3)
    groups: int = size_of(1, 1, 2, 3, 4)
    head_dim: int = size_of(*DIMS)
    query_size: float = one_of(1.0, 1.0, 1e-3, 30.0)
    value_size: str = one_of("ordinary", "ordinary", "tiny", "huge")
    holes: float = one_of(0.0, 0.0, 0.2, 1.0)
    nan_filled: bool = one_of(False, True)  # NaN in the slots and rows of no token
    layout: str = one_of("NHD", "NHD", "HND", "HNPD")
    eight_bits: bool = one_of(False, False, False, True)
    k_scale: str | None = one_of(None, None, "number", "heads")
    v_scale: str | None = one_of(None, None, "number", "heads")
    softmax_scale: float | None = one_of(None, None, 0.3)  # of the default
    sliding_window: str | None = one_of(None, None, None, "1", "5", "33", "jnp.int32(6)")
    logits_soft_cap: float | None = one_of(None, None, 2.0)
    sinks: bool | None = one_of(None, None, False, True)  # whether each head has its own

    @property
    def differentiable(self) -> bool:
        """Not where a row has a single weight and rounding outweighs what cancellation leaves."""
        return self.query_size <= 1 and self.value_size != "huge"

    @property
    def lengths(self) -> list[int]:
        """How many tokens the sequences have, some perhaps none."""
        return self.rng().integers(0, self.longest + 1, self.sequences).tolist()

    @property
    def kept(self) -> list[int]:
        """How many tokens of each sequence are read from the cache."""
        return self.lengths

    @property
    def entries(self) -> int:
        """Of a row of the table."""
        return -(-self.longest // self.page_size) + self.spare_entries

    @property
    def pages(self) -> int:
        return self.sequences * self.entries + self.spare_pages

    def table(self) -> str:
        """The page table."""
        sizes = self.sequences, self.entries, self.pages
        return made("page_table", *sizes, seed=self.seed + 3, holes=self.holes)

    def cache(self, heads: int, dim: int, number: int, size: float = 1.0) -> str:
        """Pages in this layout; what no sequence uses is NaN."""
        sizes = {"p": self.pages, "c": self.page_size, "k": heads, "h": dim}
        axes = {"NHD": "pckh", "HND": "pkch", "HNPD": "kpch"}[self.layout]
        shape = [sizes[letter] for letter in axes]
        if self.eight_bits:
            seed = self.seed + number
            return made("integers", *shape, seed=seed, low=-128, high=128, dtype="int8")
        array = made("normal", *shape, seed=self.seed + number, size=size)
        if not self.nan_filled:
            return array
        unused = f"unused_slots({self.table()}, {self.kept}, {self.pages}, {self.page_size})"
        where = ", ".join(":" if letter in "pc" else "None" for letter in axes)
        return f"nan_where({unused}[{where}], {array})"

    def rows(self, tokens: int, used: int, heads: int, dim: int, number: int, size: float) -> str:
        """An array `[tokens, heads, dim]`; rows that no sequence uses are NaN."""
        array = made("normal", tokens, heads, dim, seed=self.seed + number, size=size)
        if not self.nan_filled or used == tokens:
            return array
        return f"nan_where((np.arange({tokens}) >= {used})[:, None, None], {array})"

    def options(self) -> dict[str, str]:
        """The keyword arguments that all of them take."""
        given = {"kv_layout": f'"{self.layout}"'} if self.layout != "NHD" else {}
        if self.softmax_scale is not None:
            given["softmax_scale"] = f"{self.softmax_scale * self.head_dim**-0.5:.2g}"
        for name in ("sliding_window", "logits_soft_cap"):
            if (value := getattr(self, name)) is not None:
                given[name] = str(value)
        if self.sinks is not None:
            heads = (self.kv_heads * self.groups,) if self.sinks else ()
            given["softmax_aux"] = made("normal", *heads, 2, seed=self.seed + 7)
        low, high = (0.01, 0.02) if self.eight_bits else (0.5, 1.5)
        for i, name in enumerate(("k_scale", "v_scale")):
            kind = getattr(self, name) or ("number" if self.eight_bits else None)
            if kind is not None:
                sizes = (self.kv_heads,) if kind == "heads" else ()
                given[name] = made("uniform", *sizes, seed=self.seed + 8 + i, low=low, high=high)
        return given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode(Paged):
    """Page attention: some queries for each sequence, 0: arrays without that axis."""

    queries: int = one_of(1, 0, 2, 3)
    value_dim: int | None = size_of(None, None, *DIMS)

    def arguments(self) -> dict[str, str]:
        heads, h = self.kv_heads * self.groups, self.head_dim
        middle = (self.queries,) if self.queries else ()
        shape = (self.sequences, *middle, heads, h)
        size = self.extreme(self.value_size)
        return {
            "query": made("normal", *shape, seed=self.seed, size=self.query_size),
            "key_cache": self.cache(self.kv_heads, h, 1),
            "value_cache": self.cache(self.kv_heads, self.value_dim or h, 2, size),
            "context_lens": f"np.array({self.lengths})",
            "block_tables": self.table(),
            **self.options(),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ragged(Paged):
    """Sequences that prefill and decode together."""

    phase: str = one_of("decode", "prefill", "mixed")
    padding: int = one_of(0, 0, 1, 9)  # rows of no sequence

    @property
    def queries(self) -> list[int]:
        """How many of the tokens of each sequence are new."""
        new = {
            "decode": lambda length: min(1, length),
            "prefill": lambda length: length,
            "mixed": lambda length: int(self.rng(length).integers(0, length + 1)),
        }[self.phase]
        return [new(length) for length in self.lengths]

    @property
    def tokens(self) -> int:
        """Rows of the query, at least one."""
        return max(sum(self.queries) + self.padding, 1)

    def query(self) -> str:
        """The queries of all sequences."""
        used, heads = sum(self.queries), self.kv_heads * self.groups
        return self.rows(self.tokens, used, heads, self.head_dim, 0, self.query_size)

    def bounds(self, lengths: list[int]) -> str:
        """Cumulative lengths."""
        return f"np.array({[0, *np.cumsum(lengths).tolist()]})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedCombined(Ragged):
    """Ragged page attention v2: keys and values in the same pages, some sequences left out."""

    left_out: int = one_of(0, 0, 1)
    traced_count: bool = one_of(False, True)

    @property
    def kept(self) -> list[int]:
        counted = max(self.sequences - self.left_out, 0)
        return [x if i < counted else 0 for i, x in enumerate(self.lengths)]

    def arguments(self) -> dict[str, str]:
        count = max(self.sequences - self.left_out, 0)
        used, heads = sum(self.queries[:count]), self.kv_heads * self.groups
        size = self.query_size
        return {
            "query": self.rows(self.tokens, used, heads, self.head_dim, 0, size),
            "kv_pages": self.cache(2 * self.kv_heads, self.head_dim, 1),
            "context_lens": f"np.array({self.lengths})",
            "block_tables": self.table(),
            "query_start_loc": self.bounds(self.queries),
            "num_seqs": f"jnp.int32({count})" if self.traced_count else str(count),
            **self.options(),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedSeparate(Ragged):
    """Ragged page attention v3: keys and values in pages of their own."""

    value_dim: int | None = size_of(None, None, *DIMS)

    def arguments(self) -> dict[str, str]:
        v, size = self.value_dim or self.head_dim, self.extreme(self.value_size)
        return {
            "query": self.query(),
            "key_pages": self.cache(self.kv_heads, self.head_dim, 1),
            "value_pages": self.cache(self.kv_heads, v, 2, size),
            "cu_seqlens_q": self.bounds(self.queries),
            "cu_seqlens_k": self.bounds(self.lengths),
            "page_indices": self.table(),
            **self.options(),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedUpdate(RaggedSeparate):
    """Ragged page attention v3 that writes the new tokens."""

    @property
    def kept(self) -> list[int]:
        return [x - new for x, new in zip(self.lengths, self.queries, strict=True)]

    def arguments(self) -> dict[str, str]:
        given = super().arguments()
        used, v = sum(self.queries), self.value_dim or self.head_dim
        size = self.extreme(self.value_size)
        new = {
            "query": given.pop("query"),
            "key": self.rows(self.tokens, used, self.kv_heads, self.head_dim, 4, 1.0),
            "value": self.rows(self.tokens, used, self.kv_heads, v, 5, size),
        }
        return new | given
