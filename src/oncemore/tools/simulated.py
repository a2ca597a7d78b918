"""The simulated world of `simulate`: a server with a queue that browns out, and what is measured of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

SERVICE = 0.01  # seconds that one request takes when nobody else is there


@dataclass(frozen=True, kw_only=True)
class Brownout:
    """When the server falters, and by how much.  Load and capacity are in requests per second."""

    clients: int
    lasts: float = 60.0
    begins: float = 15.0
    ends: float = 20.0
    headroom: float = 1.5  # capacity, as a multiple of the load without retries
    together: float = 0.2  # of the operations begin on the stroke of a second, as timers do
    remaining: float = 0.2  # of the capacity, while it lasts
    patience: float = 0.5  # how long the server lets a request queue before it refuses it

    @property
    def load(self) -> float:
        return self.clients / self.lasts

    def arrivals(self, chance: Callable[[], float]) -> list[float]:
        """When the operations begin."""
        moments = (chance() * self.lasts for _ in range(self.clients))
        return sorted(float(int(moment)) if chance() < self.together else moment for moment in moments)

    def capacity(self, now: float) -> float:
        falters = self.begins <= now < self.ends
        return self.load * self.headroom * (self.remaining if falters else 1.0)


class SimulatedServer:
    """One queue, served in order.  A request whose caller has gone away is served all the same: that is the trouble."""

    # To refuse costs less than to serve, but not nothing.
    REFUSAL = 0.1

    def __init__(self, brownout: Brownout) -> None:
        self._brownout = brownout
        self._free_at = 0.0
        self.visits = 0

    def visit(self, now: float) -> tuple[float, int]:
        """When the request that arrives *now* is answered, and with which status."""
        self.visits += 1
        start = max(now, self._free_at)
        capacity = self._brownout.capacity(start)
        if not capacity:
            return now + SERVICE, 503
        share = 1 / capacity
        if start - now > self._brownout.patience:
            self._free_at = start + share * self.REFUSAL
            return now + SERVICE, 503
        self._free_at = start + share
        return start + share + SERVICE, 201


@dataclass
class Report:
    """What came of one policy."""

    name: str
    brownout: Brownout
    attempts: list[int] = field(default_factory=list)  # by second of sending
    asked: list[int] = field(default_factory=list)  # by second of the operation's beginning
    answered: list[int] = field(default_factory=list)  # of these, how many ended well
    latencies: list[float] = field(default_factory=list)
    repeated: int = 0  # operations that the server served more than once: double effects, but for the key

    @property
    def amplification(self) -> float:
        """Attempts per operation."""
        return sum(self.attempts) / max(1, sum(self.asked))

    @property
    def peak(self) -> float:
        """The highest load in any second, as a multiple of the load without retries."""
        return max(self.attempts, default=0) / self.brownout.load

    @property
    def success(self) -> float:
        return sum(self.answered) / max(1, sum(self.asked))

    @property
    def recovery(self) -> float:
        """Seconds from the end of the brownout until 99 % of what is asked for ends well, for good."""
        whole = int(self.brownout.lasts)
        bad = [at for at in range(whole) if self.answered[at] < 0.99 * self.asked[at]]
        return max(0.0, max(bad, default=-1) + 1 - self.brownout.ends)

    def latency(self, share: float) -> float:
        """The time within which this share of the successes came."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def render_table(reports: list[Report]) -> str:
    """The comparison, one line per policy."""
    lines = [
        f"{'policy':<16}{'ended well':>11}{'attempts':>10}{'peak load':>11}{'recovery':>10}"
        f"{'p50':>9}{'p99':>9}{'repeated':>10}"
    ]
    for one in reports:
        lines.append(
            f"{one.name:<16}{one.success:>11.1%}{one.amplification:>9.2f}×{one.peak:>10.2f}×{one.recovery:>8.0f} s"
            f"{one.latency(0.5):>7.2f} s{one.latency(0.99):>7.2f} s{one.repeated:>10}"
        )
    return "\n".join(lines)


COLOURS = ("#888888", "#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")
WIDTH, HEIGHT, LEFT, TOP = 900, 260, 60, 40


def render_plot(reports: list[Report]) -> str:
    """An SVG with the load on the server and the share of operations that ended well, second by second."""
    load = [[count / one.brownout.load for count in one.attempts] for one in reports]
    well = [[good / max(1, all_) for good, all_ in zip(one.answered, one.asked, strict=True)] for one in reports]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 220}" height="{2 * HEIGHT + 140}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        _chart("Load on the server (1 = without retries)", load, reports, TOP),
        _chart("Operations that ended well, by the second they began in", well, reports, TOP + HEIGHT + 50),
        *(
            f'<text x="{LEFT + WIDTH + 16}" y="{TOP + 16 + 20 * at}" fill="{COLOURS[at % 8]}">{escape(one.name)}</text>'
            for at, one in enumerate(reports)
        ),
        "</svg>",
    ]
    return "\n".join(parts)


def _chart(title: str, series: list[list[float]], reports: list[Report], top: int) -> str:
    highest = max((max(line, default=0.0) for line in series), default=0.0) or 1.0
    seconds = max((len(line) for line in series), default=1)
    brownout = reports[0].brownout
    x = [LEFT + WIDTH * second / seconds for second in range(seconds + 1)]
    shade = WIDTH * (brownout.ends - brownout.begins) / seconds
    parts = [
        f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{escape(title)}</text>',
        f'<rect x="{LEFT + WIDTH * brownout.begins / seconds:.1f}" y="{top}" width="{shade:.1f}" height="{HEIGHT}" '
        'fill="#f4e4d8"/>',
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#444"/>',
        *(
            f'<text x="{LEFT - 8}" y="{top + HEIGHT * (1 - part) + 4:.1f}" text-anchor="end">{highest * part:.2g}</text>'
            for part in (0, 0.5, 1)
        ),
        *(
            f'<text x="{x[at]:.1f}" y="{top + HEIGHT + 16}" text-anchor="middle">{at} s</text>'
            for at in range(0, seconds, 10)
        ),
    ]
    for at, line in enumerate(series):
        points = " ".join(f"{x[i]:.1f},{top + HEIGHT * (1 - value / highest):.1f}" for i, value in enumerate(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[at % 8]}" stroke-width="1.5"/>')
    return "\n".join(parts)
