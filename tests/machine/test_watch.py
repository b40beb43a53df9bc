"""The watch over signs of life, under virtual time."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from coordinator.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.looptime

#: The resolution of virtual time.
TICK_S = 1e-5


class Told:
    """What a watch told, and when."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        self.times: dict[str, float] = {}

    def __call__(self, key: str) -> None:
        assert key not in self.times, "a member expires once"
        self.times[key] = self._loop.time() - self._start_s


async def test_a_silent_member_expires_exactly_at_the_bound() -> None:
    told = Told()
    watch = Watch(15.0, told)
    watch.sign("a")
    await asyncio.sleep(14.999)
    assert told.times == {}
    assert "a" in watch
    await asyncio.sleep(100)
    assert told.times == {"a": pytest.approx(15.0, abs=TICK_S)}
    assert len(watch) == 0
    assert "a" not in watch


async def test_a_sign_moves_a_member() -> None:
    told = Told()
    watch = Watch(10.0, told)
    watch.sign("a")
    watch.sign("b")
    await asyncio.sleep(6)
    watch.sign("a")
    assert len(watch) == 2
    await asyncio.sleep(100)
    assert told.times == {
        "b": pytest.approx(10.0, abs=TICK_S),
        "a": pytest.approx(16.0, abs=TICK_S),
    }


async def test_a_discarded_member_never_expires() -> None:
    told = Told()
    watch = Watch(10.0, told)
    watch.sign("a")
    watch.sign("b")
    await asyncio.sleep(5)
    watch.discard("a")
    watch.discard("never seen")
    await asyncio.sleep(100)
    assert list(told.times) == ["b"]


async def test_an_expired_member_may_come_back() -> None:
    told = Told()
    watch = Watch(10.0, told)
    watch.sign("a")
    await asyncio.sleep(11)
    told.times.clear()
    watch.sign("a")
    await asyncio.sleep(100)
    assert told.times == {"a": pytest.approx(21.0, abs=TICK_S)}


async def test_a_callback_may_sign_again() -> None:
    """A bound that is asked for again each time it is over: the watch goes on."""
    times: list[float] = []
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    def again(key: str) -> None:
        times.append(loop.time() - start_s)
        if len(times) < 3:
            watch.sign(key)

    watch = Watch(10.0, again)
    watch.sign("a")
    await asyncio.sleep(100)
    assert times == [pytest.approx(10.0 * n, abs=TICK_S) for n in (1, 2, 3)]
    assert len(watch) == 0


@pytest.mark.parametrize(
    ("bound_s", "expected_s"),
    [(4.0, 6.0), (8.0, 8.0), (30.0, 30.0)],
    ids=["past already", "sooner", "later"],
)
async def test_a_new_bound_holds_for_members_that_are_there(bound_s: float, expected_s: float) -> None:
    told = Told()
    watch = Watch(10.0, told)
    watch.sign("a")
    await asyncio.sleep(6)
    watch.rebound(bound_s)
    assert watch.bound_s == bound_s
    await asyncio.sleep(100)
    assert told.times == {"a": pytest.approx(expected_s, abs=TICK_S)}


async def test_a_new_bound_of_an_empty_watch_holds_for_later_members() -> None:
    told = Told()
    watch = Watch(10.0, told)
    watch.rebound(3.0)
    watch.sign("a")
    await asyncio.sleep(100)
    assert told.times == {"a": pytest.approx(3.0, abs=TICK_S)}


async def test_who_stood_still_reads_what_has_come_before_it_judges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cases C16 and C23: silence that nobody could have heard is none."""
    told = Told()
    watch = Watch(10.0, told)
    for key in "abc":
        watch.sign(key)
    await asyncio.sleep(5)
    watch.sign("c")
    # As if nothing had run from here to the 40th second.
    late_s = asyncio.get_running_loop().time() + 35.0
    with monkeypatch.context() as still:
        still.setattr(asyncio.get_running_loop(), "time", lambda: late_s)
        watch._expire()
    await asyncio.sleep(35.5)  # a half second after it
    assert told.times == {}
    watch.sign("a")
    await asyncio.sleep(100)
    assert told.times == {
        "b": pytest.approx(41.0, abs=TICK_S),
        "c": pytest.approx(46.0, abs=TICK_S),
        "a": pytest.approx(50.5, abs=TICK_S),
    }


async def test_closing_forgets_everybody() -> None:
    told = Told()
    watch = Watch(10.0, told)
    watch.sign("a")
    watch.close()
    assert len(watch) == 0
    await asyncio.sleep(100)
    assert told.times == {}


async def test_all_that_are_overdue_expire_in_one_instant_oldest_first() -> None:
    told = Told()
    watch = Watch(10.0, told)
    for key in "abc":
        watch.sign(key)
    await asyncio.sleep(1)
    watch.sign("a")
    await asyncio.sleep(100)
    assert list(told.times) == ["b", "c", "a"]
    assert told.times["b"] == told.times["c"]


async def test_one_timer_serves_many_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 members and their signs cost no timer of their own; nor does a new bound."""
    loop = asyncio.get_running_loop()
    armed: list[asyncio.TimerHandle] = []
    call_at = loop.call_at

    def counting(when: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        armed.append(call_at(when, callback, *args))
        return armed[-1]

    told = Told()
    watch = Watch(10.0, told)
    monkeypatch.setattr(loop, "call_at", counting)
    for _ in range(3):
        for number in range(10_000):
            watch.sign(str(number))
    assert len(armed) == 1
    for bound_s in (20.0, 5.0, 10.0):
        watch.rebound(bound_s)
    assert [timer.cancelled() for timer in armed] == [True, True, True, False]
    monkeypatch.undo()
    await asyncio.sleep(10)
    await asyncio.sleep(TICK_S)
    assert len(told.times) == 10_000


async def test_no_bound_is_missed_whatever_the_floats_are() -> None:
    """``seen + bound - bound`` is not always ``seen``: that must not keep the timer going in circles."""
    numbers = random.Random(1)
    loop = asyncio.get_running_loop()
    for _ in range(200):
        await asyncio.sleep(numbers.random() * 10)
        bound_s = numbers.choice([0.1, 0.3, 15.0, 60.0, numbers.random() * 10])
        over: asyncio.Queue[str] = asyncio.Queue()
        watch = Watch(bound_s, over.put_nowait)
        watch.sign("a")
        start_s = loop.time()
        await over.get()
        assert loop.time() - start_s == pytest.approx(bound_s, abs=TICK_S)


async def test_members_with_signs_at_random_against_a_list() -> None:
    """Each member expires ``bound_s`` after its last sign, and no other time."""
    numbers = random.Random(2)
    told = Told()
    watch = Watch(5.0, told)
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    last: dict[str, float] = {}
    for _ in range(400):
        await asyncio.sleep(numbers.choice([0.0, 0.01, 0.2]))
        key = str(numbers.randrange(40))
        if key in told.times:
            continue
        if numbers.random() < 0.1:
            watch.discard(key)
            last.pop(key, None)
        else:
            watch.sign(key)
            last[key] = loop.time() - start_s
    await asyncio.sleep(100)
    assert told.times == {key: pytest.approx(seen + 5.0, abs=TICK_S) for key, seen in last.items()}
    assert len(told.times) > 20
