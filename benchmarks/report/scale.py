"""From one device to a pod: what attention costs on many chips, by published rates.

Bytes come from the cost model that chooses the form of `ring_attention`
(`ejkernel/kernels/ring_attention/cost.py`). This file adds what the model of a single mesh axis
does not know: how many chips share the fast links, and how fast the network between islands is.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.report import plot, results
from ejkernel.kernels.ring_attention import cost
from ejkernel.ops.platform import Device


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip and the network around it; rates are per chip and per second.

    Attributes:
        kind: the name of the device for the cost model, which has its rates.
        all_links: bytes over all fast links together, one way.
        island: how many chips the fast links connect.
        between: bytes over the network between islands, one way.
        memory: bytes.
    """

    name: str
    kind: str
    all_links: float
    island: int
    between: float
    memory: float
    sources: str

    @property
    def device(self) -> Device:
        """The chip as the cost model knows it."""
        return Device("gpu" if "NVIDIA" in self.kind else "tpu", self.kind, None, self.kind)

    @property
    def rates(self) -> cost.Rates:
        """The rates of the chip and of its link to one neighbour."""
        return cost.rates_of(self.device)


CHIPS = (
    Chip(
        name="TPU v5p",
        kind="TPU v5",
        all_links=600e9,
        island=6144,
        between=6.25e9,
        memory=95e9,
        sources="[Cloud TPU v5p](https://cloud.google.com/tpu/docs/v5p): 459 TFLOP/s, 95 GB, "
        "interconnect of 1200 GB/s in both directions together over 6 links of a 3D torus, "
        "largest job 6144 chips, data center network of 50 Gb/s per chip",
    ),
    Chip(
        name="TPU v6e",
        kind="TPU v6 lite",
        all_links=400e9,
        island=256,
        between=12.5e9,
        memory=32e9,
        sources="[Cloud TPU v6e](https://cloud.google.com/tpu/docs/v6e): 918 TFLOP/s, 32 GB, "
        "interconnect of 800 GB/s in both directions together over 4 links of a 2D torus, "
        "pods of 256 chips, data center network of 25.6 Tb/s per pod",
    ),
    Chip(
        name="H100, H200",
        kind="NVIDIA H100",
        all_links=450e9,
        island=8,
        between=50e9,
        memory=80e9,
        sources="NVIDIA's data sheets, "
        "[H100](https://www.nvidia.com/en-us/data-center/h100/) and "
        "[H200](https://www.nvidia.com/en-us/data-center/h200/): 1979 TFLOP/s with "
        "sparsity, half of it without; 80 and 141 GB; NVLink of 900 GB/s in both directions "
        "together; the [DGX H100](https://docs.nvidia.com/dgx/dgxh100-user-guide/): 8 GPUs and 8 "
        "InfiniBand ports of 400 Gb/s",
    ),
)


class Model(NamedTuple):
    """The attention of one layer: Llama 3 405B."""

    heads: int = 128
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 126
    itemsize: int = 2  # bfloat16


MODEL = Model()
COUNTS = (1024, 16384)
CONTEXTS = {"1M": 2**20, "10M": 10 * 2**20}
WINDOW = 4096
BOTH = 1 + cost.BACKWARD  # forward and backward, over the matmuls of a forward pass


class Cost(NamedTuple):
    """Seconds of a layer, forward and backward.

    Attributes:
        compute: of the chip with the most to do.
        communicate: all transfers, whether something runs meanwhile or not.
        total: with the overlap of this form.
        ideal: the work of all chips, divided evenly, with nothing to wait for.
    """

    compute: float
    communicate: float
    total: float
    ideal: float

    @property
    def share(self) -> float:
        """The part of the time in which all chips compute."""
        return self.ideal / self.total


def ring(chip: Chip, chips: int, tokens: int, balanced: bool) -> Cost:
    """A ring of all chips, with all heads on each."""
    return _ring(chip, _sizes(chips, tokens, balanced=balanced), _hop_link(chip, chips))


def pruned(chip: Chip, chips: int, tokens: int) -> Cost:
    """A ring for a causal window, which has only the hops that the window reaches."""
    shard = tokens // chips
    hops = min(chips, -(-WINDOW // shard) + 1)
    sizes = _sizes(chips, tokens, balanced=True)._replace(hops=hops, causal=False)
    # Each query sees the window, not all the keys of its hops.
    return _ring(chip, sizes, _hop_link(chip, chips), pairs=shard * min(WINDOW, tokens))


def all_gather(chip: Chip, chips: int, tokens: int) -> Cost | None:
    """All keys on every chip before it computes; None where they do not fit in its memory.

    An island receives each key once from the network, and hands it on over its own links.
    """
    sizes = _sizes(chips, tokens, balanced=True)
    gathered = 2 * tokens * MODEL.kv_heads * MODEL.head_dim * (MODEL.itemsize + 4)  # and gradients
    if gathered > chip.memory:
        return None
    sent = sum(cost.bytes_sent(sizes)["all_gather"])
    outside = max(0, chips - chip.island) / chips
    communicate = max(
        sent / chip.all_links, sent * outside / (chip.between * min(chip.island, chips))
    )
    compute = _even(chip, sizes)
    return Cost(compute, communicate, compute + communicate, compute)


def head_exchange(chip: Chip, chips: int, tokens: int) -> Cost:
    """Heads exchanged for tokens among as many chips as there are key heads, then smaller rings."""
    group = MODEL.kv_heads
    here = _sizes(group, tokens // (chips // group), balanced=True)
    sent = sum(cost.bytes_sent(here)["all_to_all"])
    distance = max(group / 4, 1) if chip.rates.torus else 1
    exchange = sent * distance / (chip.rates.link * chip.rates.links)
    sizes = _sizes(chips // group, tokens, balanced=True)._replace(
        heads=MODEL.heads // group, kv_heads=1
    )
    inner = _ring(chip, sizes, _hop_link(chip, chips))
    return Cost(inner.compute, inner.communicate + exchange, inner.total + exchange, inner.ideal)


FORMS: dict[str, Callable[[Chip, int, int], Cost | None]] = {
    "ring": lambda *call: ring(*call, balanced=False),
    "zig-zag": lambda *call: ring(*call, balanced=True),
    "all-gather": all_gather,
    "head exchange": head_exchange,
    f"window {WINDOW}": pruned,
}


def _sizes(shards: int, tokens: int, balanced: bool) -> cost.Sizes:
    return cost.Sizes(
        shards=shards,
        batch=1,
        queries=tokens // shards,
        keys=tokens // shards,
        heads=MODEL.heads,
        kv_heads=MODEL.kv_heads,
        head_dim=2 * MODEL.head_dim,
        itemsize=MODEL.itemsize,
        hops=shards,
        causal=True,
        balanced=balanced,
    )


def _hop_link(chip: Chip, chips: int) -> float:
    """What limits a hop: a ring that leaves an island waits for the network in every hop."""
    return chip.rates.link if chips <= chip.island else chip.between


def _even(chip: Chip, sizes: cost.Sizes, pairs: float | None = None) -> float:
    """Forward and backward of a chip that has its part of the visible pairs."""
    if pairs is None:
        pairs = sizes.queries * sizes.keys * sizes.hops / 2
    return BOTH * 2 * pairs * sizes.heads * sizes.head_dim / (chip.rates.flops * cost.EFFICIENCY)


def _ring(chip: Chip, sizes: cost.Sizes, link: float, pairs: float | None = None) -> Cost:
    """The hops of a ring, each as long as its computing or its transfer."""
    ideal = _even(chip, sizes, pairs)
    compute = ideal if sizes.balanced else 2 * ideal  # the last chip has something in every hop
    sends = sizes.hops - 1
    forward, backward = cost.bytes_sent(sizes)["ring"]
    wait = [count / link + sends * chip.rates.latency for count in (forward, backward)]
    of_hop = [compute / sizes.hops / BOTH, compute / sizes.hops * (1 - 1 / BOTH)]
    total = compute / sizes.hops + sum(
        max(sends * work, sent) for work, sent in zip(of_hop, wait, strict=True)
    )
    return Cost(compute, sum(wait), total, ideal)


def scenarios() -> Iterator[tuple[int, str, int]]:
    """Chips, the name of the context, its tokens."""
    for chips in COUNTS:
        for name, tokens in CONTEXTS.items():
            yield chips, name, tokens


def choice(chip: Chip, sizes: cost.Sizes) -> str:
    """What `method="auto"` takes."""
    return cost.cheapest(sizes, chip.device)


# What the page shows.


def times() -> str:
    """For each chip, the milliseconds of each form in each scenario."""
    return "\n\n".join(f"**{chip.name}**\n\n{_times_of(chip)}" for chip in CHIPS)


def _times_of(chip: Chip) -> str:
    rows = []
    for chips, name, tokens in scenarios():
        costs = {form: run(chip, chips, tokens) for form, run in FORMS.items()}
        full = {form: x.total for form, x in costs.items() if x and not form.startswith("window")}
        best = min(full, key=lambda form: full[form])
        cells = [_cell(x, bold=form == best) for form, x in costs.items()]
        auto = choice(chip, _sizes(chips, tokens, balanced=True))
        rows.append([f"{chips:,}", name, *cells, f"`{auto}`"])
    return results.table(["chips", "tokens", *FORMS, '`method="auto"`'], rows)


def _cell(x: Cost | None, bold: bool) -> str:
    if x is None:
        return "too large"
    total = f"**{_ms(x.total)}**" if bold else _ms(x.total)
    return f"{_ms(x.compute)} / {_ms(x.communicate)} → {total}"


def _ms(seconds: float) -> str:
    """Milliseconds with two or three digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


AXES = (2, 4, 8, 16, 64)
LENGTHS = {"8k": 2**13, "128k": 2**17}


def choices() -> str:
    """What `method="auto"` takes on a mesh axis, contiguous and zig-zag, with all heads there."""
    rows = []
    for chip in CHIPS:
        for name, tokens in LENGTHS.items():
            row = [chip.name, name]
            for shards in AXES:
                found = [choice(chip, _sizes(shards, tokens, balanced=x)) for x in (False, True)]
                row.append(" / ".join(f"`{x}`" for x in dict.fromkeys(found)))
            rows.append(row)
    return results.table(["chip", "tokens", *(f"{shards} devices" for shards in AXES)], rows)


def rates() -> str:
    """The published rates and where they come from."""
    rows = [
        [
            chip.name,
            f"{chip.rates.flops / 1e12:.0f} TFLOP/s",
            f"{chip.rates.link / 1e9:.0f} GB/s",
            f"{chip.all_links / 1e9:.0f} GB/s",
            f"{chip.island:,}",
            f"{chip.between / 1e9:g} GB/s",
            chip.sources,
        ]
        for chip in CHIPS
    ]
    header = ["chip", "bfloat16", "to a neighbour", "all links", "chips per island"]
    return results.table([*header, "between islands", "source"], rows)


def whole_model() -> str:
    """Attention of all layers in the best form, and the parts of the model that it needs."""
    rows = []
    for chips, name, tokens in scenarios():
        row = [f"{chips:,}", name]
        for chip in CHIPS:
            found = [
                run(chip, chips, tokens) for form, run in FORMS.items() if "window" not in form
            ]
            best = min((x for x in found if x), key=lambda x: x.total)
            row.append(f"{best.total * MODEL.layers:.1f} s, {best.share:.0%}")
        rows.append(row)
    return results.table(["chips", "tokens", *(chip.name for chip in CHIPS)], rows)


def chart(theme: plot.Theme) -> str:
    """The share of the time in which all chips compute, for every form and scenario."""
    panels = []
    for chip in CHIPS:
        groups = []
        for chips, name, tokens in scenarios():
            costs = {form: run(chip, chips, tokens) for form, run in FORMS.items()}
            bars = [(form, None if x is None else x.share) for form, x in costs.items()]
            groups.append((f"{chips:,} chips, {name} tokens", bars))
        panels.append((chip.name, groups))
    return plot.shares("Share of the time in which all chips compute", panels, theme)
