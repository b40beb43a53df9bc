"""A short handoff by itself, and right behind one of 512K tokens to the same decode rank."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from coordinator.client import DecodeRank, Layout, Outcome, PrefillRank
from coordinator.messages import Role
from scripts.benches import at_most
from scripts.benches.support.deployment import Deployment
from scripts.benches.support.pairs import ratio

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from scripts.benches import Arguments, Target

TARGETS: Final[dict[str, Target]] = {"short_ms_behind_huge": at_most(50)}

#: 80 layers and pages of 16 tokens, as Llama 3.3 70B has them; but of 128 bytes, to fit into a small host.
LAYOUT: Final = Layout(layers=80, page_tokens=16, kv_heads=1, head_size=8, dtype="uint8")
TOKENS: Final = 512 * 1024
#: Pages of a short handoff.
SHORT: Final = 4
_PATIENCE_S: Final = 120.0


class Trial(NamedTuple):
    """A short handoff, and a huge one right before it unless that is room 0."""

    short: int
    huge: int


class Times(NamedTuple):
    """From a rank's call to the outcome there, in seconds; 0 for a huge one that was not there."""

    short_s: float
    huge_s: float


def run(arguments: Arguments) -> dict[str, float]:
    """Measure; each figure is the median of a few. ``ratio`` is that of a short one behind to one alone.

    Raises:
        SimulationError: a process failed.

    """
    huge = TOKENS // LAYOUT.page_tokens // (8 if arguments.quick else 1)
    times = 3 if arguments.quick else 9
    with Deployment(__name__, {}) as deployment:
        (prefill,) = deployment.start(Role.PREFILL, "prefill", 1, pages=huge + SHORT, layout=LAYOUT)
        (decode,) = deployment.start(Role.DECODE, "decode", 1, pages=huge + SHORT, layout=LAYOUT)
        deployment.wait_ready()
        for rank in (prefill, decode):
            rank.tell(huge + SHORT)

        def measure(trial: Trial) -> Times:
            decode.tell(trial)
            decode.hear(_PATIENCE_S)
            prefill.tell(trial)
            found = Times(*prefill.hear(_PATIENCE_S))
            decode.hear(_PATIENCE_S)
            return found

        # The first ones touch the memory and open the link.
        for room in (1, 3):
            measure(Trial(room, room + 1))
        alone, behind = [], []
        for room in range(5, 5 + 4 * times, 4):
            alone.append(measure(Trial(room, 0)))
            behind.append(measure(Trial(room + 1, room + 2)))
    return {
        "short_ms_alone": 1e3 * median(each.short_s for each in alone),
        "short_ms_behind_huge": 1e3 * median(each.short_s for each in behind),
        "huge_ms": 1e3 * median(each.huge_s for each in behind),
        **ratio((there.short_s, here.short_s) for here, there in zip(alone, behind, strict=True)),
    }


def engine(rank: PrefillRank | DecodeRank, driver: Connection) -> None:
    """Hand over as the driver says, until it hangs up."""
    huge, short = _pages(driver.recv(), seed=int(isinstance(rank, DecodeRank)))
    while True:
        trial = Trial(*driver.recv())
        began_s = {}
        for room, pages in ((trial.huge, huge), (trial.short, short)):
            if not room:
                continue
            began_s[room] = time.monotonic()
            if isinstance(rank, PrefillRank):
                rank.send(room, pages, last=True)
            else:
                rank.offer(room, pages)
        if isinstance(rank, DecodeRank):
            driver.send("offered")
        ended_s: dict[int, float] = {}
        while len(ended_s) < len(began_s):
            rank.wait(1.0)
            for event in rank.drain():
                if isinstance(event, Outcome):
                    if event.failure is not None:
                        message = f"room {event.room} has failed: {event.failure}"
                        raise RuntimeError(message)
                    ended_s[event.room] = time.monotonic()
        took_s = {room: ended_s[room] - began_s[room] for room in began_s}
        driver.send(Times(took_s[trial.short], took_s.get(trial.huge, 0.0)))


def _pages(count: int, seed: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Page numbers of the huge handoff, none behind another, and those of the short one."""
    every = np.random.default_rng(seed).permutation(count).astype(np.int32)
    return every[SHORT:], every[:SHORT]
