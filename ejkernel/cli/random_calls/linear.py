"""Random calls of linear attention: gated linear, lightning and recurrent attention."""

import dataclasses

from ejkernel.cli.random_calls.choices import DIMS, LENGTHS, Choices, made, one_of, size_of

_STRENGTHS = {
    "mild": {},
    "none": {"none": 1.0},
    "strong": {"strong": 1.0},
    "uneven": {"strong": 0.2, "none": 0.3},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Choices):
    """What all of them have."""

    batch: int = size_of(1, 2, 3)
    length: int = size_of(*LENGTHS)
    kv_heads: int = size_of(1, 1, 2, 3)
    groups: int = size_of(1, 1, 2, 3)
    head_dim: int = size_of(*DIMS)
    value_dim: int | None = size_of(None, None, *DIMS)
    value_size: str = one_of("ordinary", "ordinary", "tiny", "huge")
    softmax_scale: float | None = one_of(None, None, 0.3)
    documents: int = one_of(0, 0, 1, 2, 5)  # packed into one row, 0: not packed
    tail: bool = one_of(False, True)  # tokens after the last document, all NaN
    has_state: bool = one_of(False, True)
    reverse: bool = one_of(False, True)
    has_batch: bool = one_of(True, True, True, False)

    @property
    def bounds(self) -> list[int]:
        """Where the packed documents begin and end."""
        return self.cumulative(self.documents, self.length, self.tail)

    @property
    def rows(self) -> int:
        """The size of the batch axis."""
        return 1 if self.documents or not self.has_batch else self.batch

    def of_tokens(self, function: str, *sizes: int, seed: int, **options: float) -> str:
        """An array `[batch, length, ...]` with NaN in the tokens of no document."""
        rows = (self.rows,) if self.has_batch else ()
        array = made(function, *rows, self.length, *sizes, seed=self.seed + seed, **options)
        if not self.documents or self.bounds[-1] == self.length:
            return array
        axes = ", ".join([":", *("None" for _ in sizes)])
        return f"nan_where((np.arange({self.length}) >= {self.bounds[-1]})[{axes}], {array})"

    def per_head(self, kind: str | None, seed: int, strength: str) -> str | None:
        """Decays of heads: a number, one for each, or one for each row and head."""
        if kind is None:
            return None
        sizes = {"number": (), "k": (self.kv_heads,), "bk": (self.rows, self.kv_heads)}[kind]
        if not self.has_batch:
            sizes = sizes[-1:]
        return made("log_decays", *sizes, seed=self.seed + seed, **_STRENGTHS[strength])

    def arguments(self) -> dict[str, str]:
        k, h, v = self.kv_heads, self.head_dim, self.value_dim or self.head_dim
        size = self.extreme(self.value_size)
        given = {
            "query": self.of_tokens("normal", k * self.groups, h, seed=0),
            "key": self.of_tokens("normal", k, h, seed=1),
            "value": self.of_tokens("normal", k, v, seed=2, size=size),
        }
        if self.softmax_scale is not None:
            given["softmax_scale"] = str(self.softmax_scale)
        if self.documents:
            given["cu_seqlens"] = f"np.array({self.bounds})"
        if self.has_state:
            count = (self.documents or self.rows,) if self.has_batch or self.documents else ()
            state = made("normal", *count, k, h, v, seed=self.seed + 3, size=size)
            given["state" if self.operation == "recurrent_attention" else "initial_state"] = state
        if self.reverse:
            given["reverse"] = "True"
        return given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gated(Linear):
    """Gated linear and recurrent attention; only the latter has `gv`."""

    gate: str | None = one_of(None, "shared", "rows")
    gate_strength: str = one_of(*_STRENGTHS)
    g_gamma: str | None = one_of(None, None, "number", "k", "bk")
    g_gamma_strength: str = one_of(*_STRENGTHS)
    gv: bool = one_of(False, True)
    gv_strength: str = one_of(*_STRENGTHS)

    def arguments(self) -> dict[str, str]:
        given = super().arguments()
        if self.gate is not None:
            sizes = (self.kv_heads,) if self.gate == "shared" else (self.kv_heads, self.head_dim)
            strength = _STRENGTHS[self.gate_strength]
            given["gate"] = self.of_tokens("log_decays", *sizes, seed=4, **strength)
        if gamma := self.per_head(self.g_gamma, 5, self.g_gamma_strength):
            given["g_gamma"] = gamma
        if self.gv and self.operation == "recurrent_attention":
            sizes = (self.kv_heads, self.value_dim or self.head_dim)
            strength = _STRENGTHS[self.gv_strength]
            given["gv"] = self.of_tokens("log_decays", *sizes, seed=6, **strength)
        return given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lightning(Linear):
    """Lightning attention, by decay, by its logarithm or by the layer."""

    decay_from: str | None = one_of(None, "layer", "decay", "g_gamma")
    decay_per: str = one_of("number", "k", "bk")
    decay_strength: str = one_of(*_STRENGTHS)

    def arguments(self) -> dict[str, str]:
        given = super().arguments()
        if self.decay_from == "layer":
            given |= {"layer_idx": "2", "num_layers": "5"}
        elif self.decay_from == "g_gamma":
            given["g_gamma"] = str(self.per_head(self.decay_per, 5, self.decay_strength))
        elif self.decay_from == "decay":
            strength = self.decay_strength if self.decay_strength == "none" else "mild"
            given["decay"] = f"np.exp({self.per_head(self.decay_per, 5, strength)})"
        return given
