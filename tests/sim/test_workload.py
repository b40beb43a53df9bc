"""The requests of a simulated router: within bounds, repeatable, of every kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coordinator.sim.workload import Workload

if TYPE_CHECKING:
    from coordinator.sim.wire import Request


def requests(seed: int, pool_pages: int, count: int = 300) -> list[Request]:
    workload = Workload(seed, pool_pages)
    made = []
    for _ in range(count):
        made.append(workload.ordinary())
        workload.may_use_again(made[-1])
    return made


@pytest.mark.parametrize("pool_pages", [1, 4, 512])
def test_every_request_can_be_met(pool_pages: int) -> None:
    workload = Workload(0, pool_pages)
    for request in [*requests(0, pool_pages), workload.slow()]:
        assert 1 <= request.pages <= max(1, pool_pages // 4)
        assert 1 <= request.chunk_pages <= request.pages
        assert 0 <= request.prefix_pages <= request.pages
        assert 1 <= request.room < 2**64


def test_the_same_seed_makes_the_same_requests() -> None:
    assert requests(1, 512) == requests(1, 512)
    assert requests(1, 512) != requests(2, 512)


def test_all_kinds_occur() -> None:
    made = requests(0, 512)
    assert any(request.prefix_pages == request.pages for request in made)
    assert any(0 < request.prefix_pages < request.pages for request in made)
    assert any(request.generation for request in made)
    assert any(request.chunk_pages < request.pages for request in made)
    sizes = {request.pages for request in made}
    assert min(sizes) == 1
    assert max(sizes) > 56


def test_a_room_that_is_used_again_is_of_the_next_generation() -> None:
    uses: dict[int, list[int]] = {}
    for request in requests(0, 512):
        uses.setdefault(request.room, []).append(request.generation)
    assert all(generations == list(range(len(generations))) for generations in uses.values())
    assert max(map(len, uses.values())) > 1


def test_a_slow_prompt_takes_hundreds_of_steps_in_any_pool() -> None:
    for pool_pages in (1, 16, 512):
        slow = Workload(0, pool_pages).slow()
        chunks = -(-slow.pages // slow.chunk_pages)
        assert chunks * slow.chunk_steps >= 200
