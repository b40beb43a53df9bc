"""What the tests of a coordinator that starts anew share: two engines in a deployment under virtual time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from coordinator.client.inbox import Head
from coordinator.messages import Offer, Outcome, Released, Role, Send
from tests.service.peers import LAYOUT, pages
from tests.support.faults.weather import Weather

if TYPE_CHECKING:
    from coordinator.layout import Layout
    from coordinator.messages import Event
    from tests.faults.chaos.deployment import Deployment
    from tests.faults.chaos.ranks import StormRank
    from tests.service.stage import Stage


class Deaf(Weather[list[bytes]]):
    """No broadcast arrives."""

    def let_through(self, message: list[bytes]) -> list[list[bytes]]:
        del message
        return []


def hears(rank: StormRank, *, anything: bool) -> None:
    """Let broadcasts reach a rank, or not."""
    rank.weather = Weather(0, lost=0.0, doubled=0.0, late=0.0) if anything else Deaf(0)


def events(rank: StormRank) -> list[Event]:
    """Drain all that a rank has; returns all that it ever drained."""
    inbox = rank.conversation.inbox
    rank.drain(Head(inbox.epoch, inbox.have))
    return list(rank.applied.values())


def has(rank: StormRank, *wanted: Event) -> bool:
    """Whether a rank has drained these."""
    return all(event in events(rank) for event in wanted)


async def group(
    world: Deployment, role: Role, name: str, world_size: int = 1, layout: Layout = LAYOUT
) -> list[StormRank]:
    """Let a group join and be ready."""
    ranks = [world.add(role, name, number, world_size, layout=layout) for number in range(world_size)]
    await world.until(lambda: world.is_ready(name), 10, f"{name} is ready")
    return ranks


async def pair(world: Deployment, world_size: int = 1) -> tuple[list[StormRank], list[StormRank]]:
    """A prefill group ``p`` and a decode group ``d``, with workers between them."""
    await world.begin()
    prefill = await group(world, Role.PREFILL, "p", world_size)
    decode = await group(world, Role.DECODE, "d", world_size)
    await asyncio.sleep(0.5)
    return prefill, decode


async def group_at(world: Deployment, role: Role, name: str, world_size: int) -> None:
    """Start a coordinator, and let one group join it."""
    await world.begin()
    await group(world, role, name, world_size)


async def arrive(world: Deployment, *rooms: int) -> None:
    """Wait until the coordinator has heard of these rooms."""
    assert world.stage is not None
    active = world.stage.service.rooms.active
    await world.until(lambda: all(room in active for room in rooms), 5, f"rooms {rooms} are in flight")


async def come_back(world: Deployment, *parties: list[StormRank]) -> None:
    """Start a coordinator that these find, one after the other."""
    stage = await world.begin(find=False)
    for rank in [rank for party in parties for rank in party]:
        world.find(rank)
        await world.until(lambda rank=rank: is_heard(stage, rank), 5, f"{rank.name} is back")  # type: ignore[misc]


def is_heard(stage: Stage, rank: StormRank) -> bool:
    """Whether a coordinator has a rank's hello, and perhaps waits for the others of its group."""
    waiting = stage.service.reattach._waiting.get(rank.hello.group)
    group = stage.service.membership.groups.get(rank.hello.group)
    member = group.ranks[rank.hello.rank] if group is not None else None
    return member is not None or (waiting is not None and rank.hello.rank in waiting.hellos)


async def hand_over(
    world: Deployment, prefill: StormRank, decode: StormRank, room: int, attempt: int
) -> None:
    """One handoff, from the first word to the success."""
    for rank in (decode, prefill):
        events(rank)
    decode.say(Offer(room, decode.conversation.inbox.drained, pages(1)))
    prefill.say(Send(room, prefill.conversation.inbox.drained, pages(1), last=True, aux=b"first token"))
    arrived = Outcome(room, attempt, None, b"first token")
    await world.until(lambda: has(decode, arrived), 5, f"room {room} has arrived")
    await world.until(
        lambda: has(prefill, Outcome(room, attempt), Released(room, attempt)), 5, "prefill hears"
    )
