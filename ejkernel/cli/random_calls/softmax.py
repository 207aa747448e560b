"""Random calls of softmax attention: flash, scaled dot product, ring and block-sparse attention."""

import dataclasses

from ejkernel.cli.random_calls.choices import DIMS, LENGTHS, Choices, made, one_of, size_of

_WINDOWS = ("0", "1", "5", "(7, 2)", "(0, 0)", "(3, 100)", "jnp.int32(6)", "(jnp.int32(40), 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax(Choices):
    """What all of them have."""

    batch: int = size_of(1, 2, 3)
    queries: int = size_of(*LENGTHS)
    keys: int | None = size_of(None, None, *LENGTHS)  # None: as many as there are queries
    kv_heads: int = size_of(1, 1, 2, 3)
    groups: int = size_of(1, 1, 2, 3, 4)
    head_dim: int = size_of(*DIMS)
    value_dim: int | None = size_of(None, None, *DIMS)
    query_size: float = one_of(1.0, 1.0, 1e-3, 30.0)
    value_size: str = one_of("ordinary", "ordinary", "tiny", "huge")
    softmax_scale: float | None = one_of(None, None, 0.3, 1e-3)  # of the default
    causal: bool = one_of(False, True)
    sliding_window: str | None = one_of(None, None, None, None, *_WINDOWS)
    logits_soft_cap: float | None = one_of(None, None, 2.0, 30.0)
    bias: str | None = one_of(None, None, None, None, "bnts", "nts", "ts", "n1s", "t1", "b1ts")
    bias_kind: str = one_of("normal", "large", "masked")
    sinks: str | None = one_of(None, None, None, "m", "nm")
    sinks_size: float = one_of(1.0, 20.0)
    mask: str | None = one_of(None, None, None, None, "bs", "bts", "bnts", "11ts", "1n1s")
    mask_chance: float = one_of(1.0, 0.8, 0.5, 0.05)
    mask_of_integers: bool = one_of(False, False, True)
    info: int = one_of(0, 0, 0, 1, 2, 5)  # documents of the MaskInfo, 0: there is none
    info_padding: int = one_of(0, 9)
    info_causal: bool = one_of(False, True)
    info_window: str | None = one_of(None, None, "3", "(20, 9)")
    info_chunk: int | None = one_of(None, None, 1, 16)
    info_lengths: bool = one_of(False, False, True)
    info_types: str | None = one_of(None, None, "union", "intersect", "replace")

    @property
    def differentiable(self) -> bool:
        """Not where a row has a single weight and rounding outweighs what cancellation leaves."""
        return self.query_size <= 1 and self.value_size != "huge"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes by their letters."""
        return {
            "b": self.batch,
            "n": self.kv_heads * self.groups,
            "k": self.kv_heads,
            "t": self.queries,
            "s": self.keys or self.queries,
            "h": self.head_dim,
            "v": self.value_dim or self.head_dim,
            "m": 3,
            "1": 1,
        }

    def shape(self, letters: str) -> tuple[int, ...]:
        """The shape of an array with these axes."""
        return tuple(self.sizes[letter] for letter in letters)

    def normal(self, letters: str, number: int, size: float = 1.0) -> str:
        """Normal floats with these axes."""
        return made("normal", *self.shape(letters), seed=self.seed + number, size=size)

    def arrays(self) -> dict[str, str]:
        """Query, key and value."""
        return {
            "query": self.normal("btnh", 0, self.query_size),
            "key": self.normal("bskh", 1),
            "value": self.normal("bskv", 2, self.extreme(self.value_size)),
        }

    def arguments(self) -> dict[str, str]:
        given = self.arrays()
        if self.softmax_scale is not None:
            given["softmax_scale"] = f"{self.softmax_scale * self.head_dim**-0.5:.2g}"
        for name in ("sliding_window", "logits_soft_cap"):
            if (value := getattr(self, name)) is not None:
                given[name] = str(value)
        if self.causal:
            given["causal"] = "True"
        if self.bias is not None:
            given["bias"] = self._bias(self.bias)
        if self.sinks is not None:
            given["softmax_aux"] = self.normal(self.sinks, 4, self.sinks_size)
        if self.mask is not None:
            given["attention_mask"] = self._boolean(self.mask, 5, self.mask_chance)
            given["attention_mask"] += ".astype(np.int32)" * self.mask_of_integers
        if self.info:
            given["mask_info"] = self._mask_info()
        return given

    def _boolean(self, letters: str, number: int, chance: float) -> str:
        return made("boolean", *self.shape(letters), seed=self.seed + number, chance=chance)

    def _bias(self, letters: str) -> str:
        drawn = self.normal(letters, 3, 30.0 if self.bias_kind == "large" else 1.0)
        if self.bias_kind != "masked":
            return drawn
        return f"np.where({self._boolean(letters, 6, 0.7)}, {drawn}, -np.inf)"

    def _mask_info(self) -> str:
        b, t, s = (self.sizes[letter] for letter in "bts")
        ids = [
            made(
                "segment_ids",
                b,
                length,
                seed=self.seed + 7,
                documents=self.info,
                padding=self.info_padding,
            )
            for length in dict.fromkeys((t, s))
        ]
        mask = f"MaskInfo.from_segments({', '.join(ids)})"
        mask += ".apply_causal()" * self.info_causal
        if self.info_window is not None:
            mask += f".apply_sliding_window({self.info_window})"
        if self.info_chunk is not None:
            mask += f".apply_chunked({self.info_chunk})"
        if self.info_lengths:
            mask += f".apply_kv_lengths({made('integers', b, seed=self.seed + 8, high=s + 1)})"
        if self.info_types is not None:
            types = ", ".join(made("integers", b, x, seed=self.seed + 9, high=3) for x in (t, s))
            mask += f'.apply_token_type_ids(({types}), combine="{self.info_types}")'
        return mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flash(Softmax):
    """Flash and scaled dot product attention."""

    causal_offset: str | None = one_of(None, None, "1", "-3", "17", "rows")
    documents: int = one_of(0, 0, 0, 1, 2, 5)  # packed into one row, 0: not packed
    tail: bool = one_of(False, True)  # tokens after the last document
    dropout_prob: float = one_of(0.0, 0.0, 0.0, 0.1, 0.5)
    has_batch: bool = one_of(True, True, True, False)

    @property
    def sizes(self) -> dict[str, int]:
        one_row = self.documents or not self.has_batch
        return {**super().sizes, **({"b": 1} if one_row else {})}

    def shape(self, letters: str) -> tuple[int, ...]:
        bare = not self.has_batch and letters[0] in "b1"
        return super().shape(letters[1:] if bare else letters)

    def arguments(self) -> dict[str, str]:
        given = super().arguments()
        if self.causal and self.causal_offset is not None:
            count = self.documents or self.sizes["b"]
            rows = made("integers", count, seed=self.seed + 2, low=-5, high=20)
            given["causal_offset"] = rows if self.causal_offset == "rows" else self.causal_offset
        if self.documents:
            t, s = self.queries, self.sizes["s"]
            queries = self.cumulative(self.documents, t, self.tail)
            given["cum_seqlens_q"] = f"np.array({queries})"
            if s != t:
                keys = self.cumulative(self.documents, s, self.tail, 1)
                given["cum_seqlens_k"] = f"np.array({keys})"
        if self.dropout_prob:
            given |= {"dropout_prob": str(self.dropout_prob), "dropout_seed": str(self.seed)}
        return given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(Softmax):
    """Ring attention on one device."""

    causal_offset: str | None = one_of(None, None, "1", "-3", "17", "rows")
    chunk_size: int | None = one_of(None, None, None, 1, 7, 16)
    placement: str | None = one_of(None, None, "zigzag", "striped")
    method: str | None = one_of(None, None, "ring", "all_gather", "all_to_all")
    dropout_prob: float = one_of(0.0, 0.0, 0.0, 0.1, 0.5)

    def arguments(self) -> dict[str, str]:
        given = super().arguments()
        if self.causal and self.causal_offset is not None:
            rows = made("integers", self.batch, seed=self.seed + 2, low=-5, high=20)
            given["causal_offset"] = rows if self.causal_offset == "rows" else self.causal_offset
        if self.chunk_size is not None:
            given["chunk_size"] = str(self.chunk_size)
        for name in ("placement", "method"):
            if (value := getattr(self, name)) is not None:
                given[name] = f'"{value}"'
        if self.dropout_prob:
            given |= {"dropout_prob": str(self.dropout_prob), "dropout_seed": str(self.seed)}
        return given


_BUILDERS = (
    "lambda t, s, *_: CausalMask((t, s)) & LocalMask((t, s), (9, 0))",
    "lambda t, s, *_: LocalMask((t, s), (2, None)) | ChunkedCausalMask((t, s), 16)",
    "lambda t, s, n, head, group: CausalMask((t, s)) if head % 2 else FullMask((t, s))",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocksparse(Softmax):
    """Block-sparse attention."""

    block_mask: str | None = one_of(None, "ij", "nij", "bnij", "b1ij")
    block_chance: float = one_of(1.0, 0.7, 0.3, 0.0)
    block_size: tuple[int, int] = one_of((64, 64), (16, 16), (8, 16), (10, 13), (1, 5))
    builder: str | None = one_of(None, None, None, *_BUILDERS)
    chunk_size: int | None = one_of(None, None, None, 1, 7, 16)
    heads_first: bool = one_of(False, True)

    @property
    def sizes(self) -> dict[str, int]:
        known = super().sizes
        block_q, block_k = self.block_size
        return {**known, "i": -(-known["t"] // block_q), "j": -(-known["s"] // block_k)}

    def shape(self, letters: str) -> tuple[int, ...]:
        if self.heads_first:
            letters = {"btnh": "bnth", "bskh": "bksh", "bskv": "bksv"}.get(letters, letters)
        return super().shape(letters)

    def arguments(self) -> dict[str, str]:
        given = super().arguments()
        if self.block_mask is not None:
            given["block_mask"] = self._boolean(self.block_mask, 12, self.block_chance)
        if self.block_mask is not None or self.builder is not None:
            given["block_size"] = str(self.block_size)
        if self.builder is not None:
            given["mask_builder"] = self.builder
        if self.chunk_size is not None:
            given["chunk_size"] = str(self.chunk_size)
        if self.heads_first:
            given["layout"] = '"bhsd"'
        return given
