"""Random calls of grouped matmul, mean pooling and native sparse attention."""

import dataclasses

from ejkernel.cli.random_calls.choices import DIMS, LENGTHS, Choices, made, one_of, size_of
from ejkernel.cli.random_calls.linear import Linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped(Choices):
    """Grouped matmul, by ids in any order or by sizes of sorted groups."""

    rows: int = size_of(*LENGTHS)
    k: int = size_of(*DIMS)
    n: int = size_of(*DIMS)
    groups: int = size_of(1, 2, 3, 7, 40)
    others: int = one_of(0, 0, 1, 3)  # groups whose weights are elsewhere
    offset: str | None = one_of(None, "number", "array", "vector")
    by_sizes: bool = one_of(False, True)
    outside: bool = one_of(False, True)  # rows of no group, which are NaN
    only: int | None = one_of(None, None, None, 0)  # the group of all rows
    transposed: bool = one_of(False, True)
    wide: bool = one_of(False, True)  # an output in float32
    existing: bool = one_of(False, True)
    rows_size: str = one_of("ordinary", "ordinary", "tiny", "huge")

    @property
    def total(self) -> int:
        """How many groups there are; sizes without an offset are those of all weights."""
        only_here = self.by_sizes and self.offset is None
        return self.groups + (0 if only_here else self.others)

    @property
    def ids(self) -> list[int]:
        """The group of each row; beyond the groups, or -1, for a row of none."""
        rng, count = self.rng(), self.total
        low, high = (-1, count + 1) if self.outside and not self.by_sizes else (0, count)
        if self.only is not None:
            low, high = self.only, self.only + 1
        ids = rng.integers(low, high, self.rows).tolist()
        if not self.by_sizes:
            return ids
        end = int(rng.integers(0, self.rows + 1)) if self.outside else self.rows
        return [x if i < end else -1 for i, x in enumerate(sorted(ids))]

    @property
    def first(self) -> int:
        """The group of the first weight."""
        return 0 if self.offset is None else self.others // 2

    def arguments(self) -> dict[str, str]:
        here = range(self.first, self.first + self.groups)
        away = [i for i, x in enumerate(self.ids) if x not in here]
        empty = [i for i, group in enumerate(here) if group not in self.ids]
        size = self.extreme(self.rows_size)
        inner = (self.n, self.k) if self.transposed else (self.k, self.n)
        rows = made("normal", self.rows, self.k, seed=self.seed, size=size)
        weights = made("normal", self.groups, *inner, seed=self.seed + 1, size=self.k**-0.5)
        if self.outside and away:
            rows = f"nan_where(np.isin(np.arange({self.rows}), {away})[:, None], {rows})"
        if self.outside and empty:
            where = f"np.isin(np.arange({self.groups}), {empty})[:, None, None]"
            weights = f"nan_where({where}, {weights})"
        given = {"inputs": rows, "weights": weights, **self._groups()}
        offsets = {"number": "{}", "array": "jnp.int32({})", "vector": "np.array([{}])"}
        if self.offset is not None:
            given["group_offset"] = offsets[self.offset].format(self.first)
        if self.existing:
            given["existing_out"] = made("normal", self.rows, self.n, seed=self.seed + 2)
        if self.transposed:
            given["transpose_rhs"] = "True"
        if self.wide and not self.existing:
            given["preferred_element_type"] = "jnp.float32"
        return given

    def _groups(self) -> dict[str, str]:
        if not self.by_sizes:
            return {"group_ids": f"np.array({self.ids})"}
        sizes = [self.ids.count(group) for group in range(self.total)]
        return {"group_sizes": f"np.array({sizes})"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pooling(Choices):
    """Mean pooling; tokens that do not count are NaN."""

    batch: int = size_of(1, 2, 3)
    length: int = size_of(*LENGTHS)
    hidden: int = size_of(*DIMS)
    size: str = one_of("ordinary", "ordinary", "tiny", "huge")
    mask_chance: float | None = one_of(None, 1.0, 0.7, 0.0)
    mask_of_integers: bool = one_of(False, True)
    documents: int = one_of(0, 0, 1, 2, 5)  # packed into one row, 0: not packed
    tail: bool = one_of(False, True)
    has_batch: bool = one_of(True, False)

    def arguments(self) -> dict[str, str]:
        size = self.extreme(self.size)
        if self.documents:
            bounds = self.cumulative(self.documents, self.length, self.tail)
            rows = (1,) if self.has_batch else ()
            x = made("normal", *rows, self.length, self.hidden, seed=self.seed, size=size)
            past = f"(np.arange({self.length}) >= {bounds[-1]})[:, None]"
            return {"x": f"nan_where({past}, {x})", "cu_seqlens": f"np.array({bounds})"}
        x = made("normal", self.batch, self.length, self.hidden, seed=self.seed, size=size)
        if self.mask_chance is None:
            return {"x": x}
        sizes = (self.batch, self.length)
        mask = made("boolean", *sizes, seed=self.seed + 1, chance=self.mask_chance)
        kind = ".astype(np.int32)" * self.mask_of_integers
        return {"x": f"nan_where(~{mask}[:, :, None], {x})", "attention_mask": mask + kind}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeSparse(Linear):
    """Native sparse attention; of linear attention it has the arrays and the packed documents."""

    has_state: bool = False
    reverse: bool = False
    has_batch: bool = True
    block_size: int = one_of(64, 1, 4, 8, 16)
    lists: str | None = one_of(None, "tkc", "tc", "lkc", "klc")
    list_length: int = size_of(1, 2, 4)
    counts: str | None = one_of(None, "0", "2", "array")
    g_cmp: bool = one_of(False, True)
    g_slc: bool = one_of(False, True)
    g_swa: bool = one_of(False, True)
    sliding_window: str | None = one_of(None, None, "1", "5", "70", "jnp.int32(6)")

    @property
    def differentiable(self) -> bool:
        """As in softmax attention: a token may see a single key."""
        return self.value_size != "huge"

    def arguments(self) -> dict[str, str]:
        given = super().arguments()
        given["block_size"] = str(self.block_size)
        for i, name in enumerate(("g_cmp", "g_slc", "g_swa")):
            if getattr(self, name) and (name != "g_swa" or self.sliding_window is not None):
                heads = self.kv_heads * self.groups
                given[name] = self.of_tokens("uniform", heads, seed=4 + i)
        if self.sliding_window is not None:
            given["sliding_window"] = self.sliding_window
        return given | self._lists()

    def _lists(self) -> dict[str, str]:
        blocks = -(-self.length // self.block_size)
        counts = None if self.counts is None else {"block_counts": self.counts}
        if self.lists is None:
            return {"block_counts": "3"} if self.counts in (None, "array") else counts or {}
        sizes = {"t": self.length, "k": self.kv_heads, "l": blocks, "c": self.list_length}
        shape = (self.rows, *(sizes[letter] for letter in self.lists))
        lists = made("integers", *shape, seed=self.seed + 7, low=-1, high=blocks + 1)
        if self.counts == "array":
            high = self.list_length + 2
            counts = {"block_counts": made("integers", *shape[:-1], seed=self.seed + 8, high=high)}
        return {"block_indices": lists, **(counts or {})}
