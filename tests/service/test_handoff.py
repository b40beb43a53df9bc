"""A handoff from its first sign to its verdict, through the real coordinator, on both loops."""

from __future__ import annotations

from tests.service.peers import pages
from tests.service.stage import Stage


async def test_pages_move_and_both_groups_hear_success() -> None:
    async with Stage() as stage:
        prefill, decode, workers = await stage.pair(2, auto=False)
        for rank in decode:
            rank.offer(7, 3, 4)
        for rank in prefill:
            rank.send_pages(7, 1, 2, aux=b"first token")
        for worker in workers:
            move = await worker.move()
            assert (move.source_pages, move.destination_pages) == (pages(1, 2), pages(3, 4))
            worker.done(move)
        for rank in prefill + decode:
            outcome = await rank.outcome(7)
            assert outcome.succeeded
            assert outcome.aux == (b"first token" if rank in decode else b"")
            await rank.release(7)
            rank.drain()
        assert stage.service.counters.succeeded == 1
        assert stage.service.counters.bytes_moved == 2 * 8 * 64
        await stage.empty()
