"""A handoff from its first sign to its verdict, through the real coordinator."""

from __future__ import annotations

from peers import Stage, eventually, turns  # type: ignore[import-not-found]


async def test_pages_move_and_both_groups_hear_success() -> None:
    async with Stage() as stage:
        prefill, decode, workers = await stage.pair(2, auto=False)
        for worker in workers:
            await eventually(lambda worker=worker: worker.commands)
        for rank in decode:
            rank.offer(7, 3, 4)
        for rank in prefill:
            rank.send_pages(7, 1, 2, aux=b"first token")
        for worker in workers:
            await eventually(lambda worker=worker: worker.moves())
            worker.done(worker.moves()[0])
        for rank in prefill + decode:
            outcome = await rank.outcome(7)
            assert outcome.succeeded
            assert outcome.aux == (b"first token" if rank in decode else b"")
            await eventually(lambda rank=rank: rank.released(7))
        await eventually(lambda: not stage.service.rooms.unreleased)
        assert not stage.service.rooms.active
        assert stage.service.counters.succeeded == 1
