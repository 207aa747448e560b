"""How long each method of ring attention takes, by published rates; the choice of `auto`.

With n devices, q the bytes of a device's queries and outputs, k those of its keys and values, g the
same in float32 for their gradients, a device sends

| method | forward | backward |
|---|---|---|
| `ring` | `k` in each hop but the last | `k + g` in each hop but the last, `g` to the owner |
| `all_gather` | `(n - 1) k` | `(n - 1) (k + g)` |
| `all_to_all` | `(n - 1) / n (q + k)` | `(n - 1) / n (2 q + 2 k)` |

The ring overlaps what it sends with what it computes; the others compute when all has arrived. On
the other hand a contiguous causal ring waits in each hop for the device that has most to do, and
`all_gather` for the last device, where after an exchange of heads all have equal work.
"""

from typing import Literal, NamedTuple

from ejkernel.ops.platform import Device

ConcreteMethod = Literal["ring", "all_gather", "all_to_all"]


class Sizes(NamedTuple):
    """A call on one device of the ring.

    Attributes:
        shards: devices of the ring.
        batch: batch rows.
        queries: queries of this device.
        keys: keys of this device.
        heads: query heads.
        kv_heads: key heads.
        head_dim: of keys and values together.
        itemsize: bytes of a number.
        hops: hops that the mask needs.
        causal: whether about half of all pairs are hidden.
        balanced: whether the placement gives all devices the same part of them.
    """

    shards: int
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    hops: int
    causal: bool = False
    balanced: bool = False


class Rates(NamedTuple):
    """What a device does in a second: floating-point operations, bytes over a link each way.

    `links` is how many links an axis of the mesh uses in a ring; `torus` says that a message to a
    device far away crosses the links between. `latency` is that of one transfer in seconds.
    """

    flops: float
    link: float
    links: int
    torus: bool
    latency: float


# Published rates in 16 bits and of links.
_RATES = {
    "TPU v4": Rates(275e12, 50e9, 2, True, 1e-6),
    "TPU v5 lite": Rates(197e12, 50e9, 2, True, 1e-6),
    "TPU v5e": Rates(197e12, 50e9, 2, True, 1e-6),
    "TPU v5": Rates(459e12, 100e9, 2, True, 1e-6),
    "TPU v6": Rates(918e12, 100e9, 2, True, 1e-6),
    "TPU7x": Rates(2307e12, 200e9, 2, True, 1e-6),
    "A100": Rates(312e12, 300e9, 1, False, 5e-6),
    "H100": Rates(989e12, 450e9, 1, False, 5e-6),
    "H200": Rates(989e12, 450e9, 1, False, 5e-6),
    "B200": Rates(2250e12, 900e9, 1, False, 5e-6),
}
_HOST = Rates(0.2e12, 10e9, 1, False, 20e-6)
EFFICIENCY = 0.5  # of the published rate, which attention reaches
BACKWARD = 2.5  # times the matmuls of the forward pass
_PREFERENCE = 0.95  # a method without hops must be so much faster than the ring


def rates_of(device: Device) -> Rates:
    """The rates of a device; those of a v5e or an H100 where its name says nothing."""
    # The longest name that fits: "TPU v5 lite" is not a "TPU v5".
    found = [name for name in _RATES if name in device.kind]
    if found:
        return _RATES[max(found, key=len)]
    return {"tpu": _RATES["TPU v5e"], "gpu": _RATES["H100"]}.get(device.platform, _HOST)


def bytes_sent(sizes: Sizes) -> dict[ConcreteMethod, tuple[float, float]]:
    """What a device sends, forward and backward, as in the table above; only what is possible.

    >>> sizes = Sizes(4, 1, 1024, 1024, 8, 2, 256, 2, hops=4)
    >>> {name: round(sum(sent) / 2**20, 1) for name, sent in bytes_sent(sizes).items()}
    {'ring': 14.0, 'all_gather': 12.0}
    """
    n = sizes.shards
    q = sizes.batch * sizes.queries * sizes.heads * sizes.head_dim * sizes.itemsize
    numbers = sizes.batch * sizes.keys * sizes.kv_heads * sizes.head_dim
    k, g = float(numbers * sizes.itemsize), 4.0 * numbers
    sends = sizes.hops - 1
    sent: dict[ConcreteMethod, tuple[float, float]] = {
        "ring": (sends * k, sends * (k + g) + (g if sends else 0.0)),
        "all_gather": ((n - 1) * k, (n - 1) * (k + g)),
    }
    if not (sizes.heads % n or sizes.kv_heads % n):
        part = (n - 1) / n
        sent["all_to_all"] = (part * (q + k), part * (2 * q + 2 * k))
    return sent


def seconds(sizes: Sizes, rates: Rates) -> dict[ConcreteMethod, float]:
    """The time of each method that is possible, forward and backward."""
    n, sends = sizes.shards, sizes.hops - 1
    sent = bytes_sent(sizes)
    pairs = sizes.batch * sizes.heads * sizes.queries * sizes.keys
    hop = 2 * pairs * sizes.head_dim / (rates.flops * EFFICIENCY)  # nothing hidden
    mean = hop * sizes.hops * (0.5 if sizes.causal and sizes.hops == n else 1.0)
    slowest = mean if sizes.balanced else hop * sizes.hops
    of_hop = slowest / sizes.hops
    both = 1 + BACKWARD

    steps = (n - 1) / rates.links if rates.torus else 1
    # A ring sends one way; a gather sends both ways round.
    wait = lambda count: count / rates.link / max(sends, 1) + rates.latency
    forward, backward = (wait(count) for count in sent["ring"])
    times: dict[ConcreteMethod, float] = {
        "ring": slowest / sizes.hops * both
        + sends * (max(of_hop, forward) + max(of_hop * BACKWARD, backward)),
        "all_gather": slowest * both
        + sum(sent["all_gather"]) / (rates.link * rates.links)
        + 3 * steps * rates.latency,
    }
    if "all_to_all" in sent:
        # On a torus a message crosses n / 4 links on average, in both directions.
        distance = max(n / 4, 1) if rates.torus else 1
        over = rates.link * rates.links
        times["all_to_all"] = (
            mean * both + sum(sent["all_to_all"]) * distance / over + 8 * steps * rates.latency
        )
    return times


def cheapest(sizes: Sizes, device: Device) -> ConcreteMethod:
    """The method to take: the ring, unless another is faster by more than the model may err.

    Keys are gathered only where all of them take no more memory than the queries of a device: a
    sequence that is split must not be too long for a device after all.
    """
    times = seconds(sizes, rates_of(device))
    if sizes.shards * sizes.keys * sizes.kv_heads > sizes.queries * sizes.heads:
        del times["all_gather"]
    best = min(times, key=lambda method: times[method])
    return best if times[best] < _PREFERENCE * times["ring"] else "ring"
