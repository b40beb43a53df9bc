"""The router: who gets a prompt, how long its request is, and what decode has of it already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from coordinator.replay.router import Cache, Pace, Router
from coordinator.replay.trace import Prompt
from coordinator.sim.book import Handoff, Party

if TYPE_CHECKING:
    from coordinator.sim.group import EngineGroup

PACE = Pace(speed=20.0, step_s=0.005, page_tokens=16, pool_pages=1000)


def engine(name: str) -> EngineGroup:
    """An engine, as far as a router looks at it."""
    return cast("EngineGroup", SimpleNamespace(name=name, is_ready=True, party=Party(name, 1, 2)))


class Site:
    """A router between two prefill and two decode engines."""

    def __init__(self) -> None:
        self.prefill, self.decode = (
            [engine(f"{role}-{n}") for n in range(2)] for role in ("prefill", "decode")
        )
        self.router = Router(self.prefill, self.decode, PACE)

    def route(self, tokens: int, blocks: tuple[int, ...] = (), answer: int = 100) -> Handoff:
        routed = self.router.route(Prompt(0, tokens, answer, blocks))
        assert routed is not None
        request, prefill, decode = routed
        return Handoff(request, prefill.party, decode.party, 0.0)

    def succeed(self, handoff: Handoff) -> None:
        handoff.outcome = ""
        self.router.over(handoff)


def test_a_prompt_becomes_pages_chunks_and_steps() -> None:
    request = Site().route(tokens=5000, answer=400).request
    assert (request.pages, request.chunk_pages, request.prefix_pages) == (313, 128, 0)
    # A chunk takes 0.1 s of the trace, an answer of 400 tokens 10 s; a step is 0.1 s of the trace.
    assert (request.chunk_steps, request.answer_steps) == (1, 100)


def test_a_prefix_that_decode_has_received_does_not_travel_again() -> None:
    site = Site()
    site.succeed(site.route(1200, (1, 2, 3)))
    site.succeed(site.route(1200, (9, 2, 3)))
    again = site.route(1500, (1, 2, 4))
    assert again.request.prefix_pages == 2 * 512 // 16
    site.succeed(again)
    whole = site.route(1200, (1, 2, 3))
    # A prefix is never longer than the prompt.
    assert (whole.request.pages, whole.request.prefix_pages) == (75, 75)
    site.succeed(whole)
    # A last page that is not full travels.
    assert site.route(1190, (1, 2, 3)).request.prefix_pages == 74


def test_what_failed_or_was_killed_is_no_prefix() -> None:
    site = Site()
    failed = site.route(512, (1,))
    failed.outcome = "peer_lost"
    site.router.over(failed)
    assert site.route(512, (1,)).request.prefix_pages == 0
    other = Site()
    done = other.route(512, (1,))
    other.succeed(done)
    other.router.forget(done.decode)
    assert other.route(512, (1,)).request.prefix_pages == 0


def test_the_engine_with_the_fewest_pages_in_hand_gets_the_next_one() -> None:
    site = Site()
    first, second, third = site.route(16000), site.route(160), site.route(160)
    assert [each.decode.group for each in (first, second, third)] == ["decode-0", "decode-1", "decode-1"]
    site.succeed(first)
    assert site.route(160).prefill.group == "prefill-0"


def test_without_an_engine_that_is_ready_a_prompt_waits() -> None:
    site = Site()
    for group in site.decode:
        cast("SimpleNamespace", group).is_ready = False
    assert site.router.route(Prompt(0, 16, 1, ())) is None
    cast("SimpleNamespace", site.decode[1]).is_ready = True
    assert site.route(16).decode.group == "decode-1"


def test_a_cache_forgets_what_was_used_longest_ago_and_ends_before_beginnings() -> None:
    cache = Cache(4)
    cache.add((1, 2, 3))
    cache.add((1, 7))
    assert cache.prefix((1, 2, 3)) == 3
    cache.add((8,))
    assert cache.prefix((1, 2, 3)) == 2
    assert cache.prefix((1, 7, 9)) == 2
    assert cache.prefix((8, 1)) == 2
    assert cache.prefix((5,)) == 0


@pytest.mark.parametrize(("trace_s", "steps"), [(0.0, 1), (0.1, 1), (0.3, 3), (60.0, 600)])
def test_seconds_of_the_trace_are_steps(trace_s: float, steps: int) -> None:
    assert PACE.steps(trace_s) == steps
