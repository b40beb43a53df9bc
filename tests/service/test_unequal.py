"""Engines of unequal size: which moves are made, and what completes a handoff."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from coordinator.layout import Layout
from coordinator.messages import MoveDone, Role
from coordinator.slices import legs, page_bytes, slice_of
from tests.service.peers import LAYOUT, pages
from tests.service.stage import Stage, VirtualStage, virtual_time

if TYPE_CHECKING:
    from tests.service.peers import RankPeer, WorkerPeer

LATENT = Layout(layers=2, page_tokens=16, kv_heads=1, head_size=8, dtype="float16", kv="latent")
STAGED = Layout(layers=2, page_tokens=16, kv_heads=8, head_size=8, dtype="float16", stages=(1, 1))


async def engines(
    stage: Stage, prefill_world: int, decode_world: int, prefill: Layout = LAYOUT, decode: Layout = LAYOUT
) -> tuple[list[RankPeer], list[RankPeer], list[WorkerPeer]]:
    """Two engines and the workers between them, which do what the test says."""
    sources = await stage.group(Role.PREFILL, "p", prefill_world, layout=prefill)
    targets = await stage.group(Role.DECODE, "d", decode_world, layout=decode)
    workers = await stage.workers(auto=False)
    pairs = legs(prefill, prefill_world, decode, decode_world)
    for worker in workers:
        await worker.commanded([source for source, _ in pairs].count(worker.worker.rank.number))
        worker.connect_all()
    return sources, targets, workers


def moves_of(workers: list[WorkerPeer]) -> set[tuple[int, str]]:
    """(prefill rank, decode rank) of every move that was asked for."""
    return {
        (worker.worker.rank.number, move.peer.partition("#")[0])
        for worker in workers
        for move in worker.moves()
    }


@virtual_time
async def test_four_sources_complete_one_target_and_a_double_does_not_count() -> None:
    """Case C34: prefill TP 4 to decode TP 1, counted by distinct source and destination."""
    async with VirtualStage() as stage:
        prefill, (decode,), workers = await engines(stage, 4, 1)
        decode.offer(7, 5)
        for rank in prefill:
            rank.send_pages(7, 3)
        asked = [await worker.move() for worker in workers]
        assert moves_of(workers) == {(rank, "d/0") for rank in range(4)}
        # The first one says it four times: it is still one of four.
        for _ in range(4):
            workers[0].report(MoveDone(asked[0].move, 1, 0.001))
        for worker, move in zip(workers[1:3], asked[1:3], strict=True):
            worker.done(move)
        await asyncio.sleep(1.0)
        assert not decode.events
        workers[3].done(asked[3])
        assert (await decode.outcome(7)).succeeded
        for rank in prefill:
            assert (await rank.outcome(7)).succeeded


@virtual_time
async def test_one_source_serves_four_targets() -> None:
    async with VirtualStage() as stage:
        (prefill,), decode, (worker,) = await engines(stage, 1, 4)
        prefill.send_pages(7, 3)
        for rank in decode:
            rank.offer(7, 10 + rank.hello.rank)
        await worker.move(3)
        assert {(move.peer.partition("#")[0], move.destination_pages) for move in worker.moves()} == {
            (f"d/{rank}", pages(10 + rank)) for rank in range(4)
        }
        for move in worker.moves():
            worker.done(move)
        assert (await decode[3].outcome(7)).succeeded


@virtual_time
async def test_of_a_latent_the_other_sources_complete_at_once() -> None:
    """One source for each destination; the others send nothing, and still must have said their last."""
    async with VirtualStage() as stage:
        prefill, decode, workers = await engines(stage, 4, 2, LATENT, LATENT)
        for rank in decode:
            rank.offer(7, 1)
        for rank in prefill[:3]:
            rank.send_pages(7, 2)
        await workers[0].move()
        await workers[2].move()
        assert moves_of(workers) == {(0, "d/0"), (2, "d/1")}
        for number in (0, 2):
            workers[number].done(workers[number].moves()[0])
        await asyncio.sleep(1.0)
        assert not decode[0].events, "prefill rank 3 has not said its last word"
        prefill[3].send_pages(7, 2)
        assert (await decode[0].outcome(7)).succeeded
        assert (await prefill[1].outcome(7)).succeeded


@virtual_time
async def test_every_stage_sends_its_layers() -> None:
    async with VirtualStage() as stage:
        prefill, decode, workers = await engines(stage, 4, 2, STAGED, LAYOUT)
        for rank in decode:
            rank.offer(7, 1)
        for rank in prefill:
            rank.send_pages(7, 2)
        for worker in workers:
            worker.done(await worker.move())
        assert moves_of(workers) == {(0, "d/0"), (1, "d/1"), (2, "d/0"), (3, "d/1")}
        assert (await decode[1].outcome(7)).succeeded


@pytest.mark.parametrize(("sent", "offered", "prefix"), [(3, 2, 0), (2, 3, 0), (3, 1, 1), (1, 1, 1)])
@virtual_time
async def test_numbers_of_pages_that_differ_are_refused_with_both_and_the_room(
    sent: int, offered: int, prefix: int
) -> None:
    async with VirtualStage() as stage:
        prefill, decode, _ = await engines(stage, 4, 2)
        decode[1].offer(7, *range(offered), prefix=prefix)
        prefill[3].send_pages(7, *range(sent))
        outcome = await prefill[0].outcome(7)
        assert outcome.failure is not None
        assert outcome.failure.reason == "rejected"
        assert outcome.failure.message == (
            f"room 7: prefill rank 3 sent {sent} pages, "
            f"decode rank 1 offered {offered} behind a prefix of {prefix}"
        )


@virtual_time
async def test_what_decode_has_already_does_not_travel() -> None:
    """Case C48, with unequal engines: each decode rank may have another prefix."""
    async with VirtualStage() as stage:
        prefill, decode, workers = await engines(stage, 1, 2)
        decode[0].offer(7, prefix=2)
        decode[1].offer(7, 9, prefix=1)
        prefill[0].send_pages(7, 3, 4)
        move = await workers[0].move()
        assert (move.source_pages, move.destination_pages) == (pages(4), pages(9))
        workers[0].done(move)
        assert (await decode[0].outcome(7)).succeeded
        assert len(workers[0].moves()) == 1


@virtual_time
async def test_what_is_held_counts_what_the_leg_carries() -> None:
    """Two of eight heads of each page, not the whole pages of the source."""
    async with VirtualStage() as stage:
        (prefill,), decode, (worker,) = await engines(stage, 1, 4)
        prefill.send_pages(7, 3)
        decode[2].offer(7, 1)
        await worker.move()
        (flight,) = stage.service.transfers.flights.values()
        assert flight.size_bytes == page_bytes(LAYOUT, slice_of(LAYOUT, 1, 0, LAYOUT, 4, 2))
        assert flight.size_bytes * 4 == LAYOUT.pool_bytes(1, 1)
