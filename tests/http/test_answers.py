"""What is answered is true, and is what the description says."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.http.routes import SECRET, TABLE
from coordinator.messages import Offer, Role
from coordinator.overview import Overview
from tests.http.schema import mistakes
from tests.http.served import in_every_state, served
from tests.service.peers import LAYOUT, pages
from tests.service.stage import config
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from tests.http.served import Served


async def check(it: Served, method: str, path: str, template: str, status: int) -> Any:  # noqa: ANN401 - JSON
    """Call a path, and compare the answer with its description."""
    document = await it.get("/openapi.json")
    schema = document["paths"][template][method.lower()]["responses"][str(status)]
    answer = await it.call(method, path, status)
    content = schema["content"]["application/json"]["schema"]
    assert mistakes(answer, content, document["components"]["schemas"]) == []
    return answer


async def test_every_answer_is_as_described_whatever_the_handoffs_do() -> None:
    async with served() as it:
        rooms = await in_every_state(it.stage)
        for route in TABLE:
            if route.method != "GET" or route.content != "application/json" or "{room}" in route.path:
                continue
            await check(it, "GET", route.path, route.path, 200)
        for room in rooms.values():
            await check(it, "GET", f"/v1/handoffs/{room}", "/v1/handoffs/{room}", 200)
        await check(it, "GET", "/v1/handoffs/999", "/v1/handoffs/{room}", 404)
        await check(it, "GET", "/v1/handoffs/nonsense", "/v1/handoffs/{room}", 400)
        await check(it, "GET", "/v1/handoffs?limit=0", "/v1/handoffs", 400)
        for path in ("/v1/drain", "/v1/resume"):
            await check(it, "POST", path, path, 200)
        await check(it, "POST", "/v1/reload", "/v1/reload", 409)
        cancel = "/v1/handoffs/{room}/cancel"
        await check(it, "POST", cancel.format(room=rooms["waiting"]), cancel, 200)
        await check(it, "POST", cancel.format(room=rooms["waiting"]), cancel, 409)
        await check(it, "POST", cancel.format(room=999), cancel, 404)


async def test_the_checker_of_answers_finds_mistakes() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert mistakes({"a": 1}, schema, {}) == []
    assert mistakes({"a": True}, schema, {}) == ["$.a: True is no integer"]
    assert mistakes({"b": 1}, schema, {}) == ["$: a is missing", "$: b is not described"]


async def test_a_glance_counts_every_handoff_once() -> None:
    async with served() as it:
        await in_every_state(it.stage)
        status = await it.get("/v1/status")
        assert status["in_flight"] == {"open": 1, "waiting": 1, "moving": 1}
        assert status["opened"] == 5
        assert status["failed"] == {"cancelled_by_prefill": 2}
        assert status["unreleased"] == 1
        assert status["quarantine"]["handoffs"] == 1
        assert [(g["name"], g["ready"], g["in_flight"]) for g in status["groups"]] == [
            ("p", True, 2),
            ("d", True, 2),
        ]
        assert 0 <= status["oldest_after_prefill_s"] <= status["oldest_s"] < 20


async def test_a_glance_is_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request that has waited since it was opened the clock tells no more than of its age."""
    async with served() as it:
        (rank,) = await it.stage.group(Role.PREFILL, "p", 1)
        rank.send_pages(1, 1)
        await eventually_async(lambda: it.stage.service.rooms.past_prefill)
        since_s = it.stage.service.overview.now_s()
        ticks = itertools.count()
        monkeypatch.setattr(Overview, "now_s", staticmethod(lambda: since_s + next(ticks)))
        status = await it.get("/v1/status")
        assert 0 <= status["oldest_after_prefill_s"] <= status["oldest_s"]


async def test_a_stuck_request_says_whom_it_waits_for() -> None:
    async with served() as it:
        rooms = await in_every_state(it.stage)
        story = await it.get(f"/v1/handoffs/{rooms['waiting']}")
        handoff = story["handoff"]
        assert (handoff["room"], handoff["state"], handoff["prefill"], handoff["decode"]) == (
            "2",
            "waiting",
            "p",
            None,
        )
        assert handoff["missing"] == "the offer of any decode group"
        assert 299 < handoff["remaining_s"] + handoff["after_prefill_s"] < 301
        assert [(word["rank"], word["said"], word["pages"]) for word in story["ranks"]] == [
            ("p/0", "complete", 1),
            ("p/1", "nothing", 0),
        ]
        assert [(step["state"], step["cause"]) for step in story["story"]] == [
            ("open", "its first sign"),
            ("waiting", "Sent by rank 0"),
        ]
        assert story["ended_s"] is None


async def test_moves_under_way_are_shown_with_their_links() -> None:
    async with served() as it:
        rooms = await in_every_state(it.stage)
        story = await it.get(f"/v1/handoffs/{rooms['moving']}")
        page_bytes = LAYOUT.planes * LAYOUT.page_bytes(2)
        assert [(m["link"], m["link_state"], m["size_bytes"]) for m in story["moves"]] == [
            ("p/0 -> d/0", "up", page_bytes),
            ("p/1 -> d/1", "up", page_bytes),
        ]
        assert story["handoff"]["moving_bytes"] == 2 * page_bytes
        held = await it.get(f"/v1/handoffs/{rooms['held']}")
        assert held["handoff"]["held"] == ["prefill", "decode"]
        assert held["handoff"]["failure"]["message"] == "the user is gone"
        assert held["story"][-1]["cause"] == "Aborted cancelled_by_prefill: the user is gone"
        quarantine = await it.get("/v1/quarantine")
        assert [handoff["room"] for handoff in quarantine["handoffs"]] == [str(rooms["held"])]
        assert quarantine["summary"]["held_bytes"] == 2 * page_bytes


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", ["open", "moving", "held", "waiting"]),
        ("?state=waiting", ["waiting"]),
        ("?state=failed", ["held", "refused"]),
        ("?group=d", ["open", "moving", "held"]),
        ("?reason=cancelled_by_prefill", ["held", "refused"]),
        ("?reason=deadline", []),
        ("?older_s=60", []),
    ],
)
async def test_handoffs_are_chosen_by_what_one_looks_for(query: str, expected: list[str]) -> None:
    async with served() as it:
        rooms = await in_every_state(it.stage)
        found = (await it.get(f"/v1/handoffs{query}"))["handoffs"]
        assert {handoff["room"] for handoff in found} == {str(rooms[name]) for name in expected}


async def test_a_long_list_comes_in_pages_and_nothing_is_missing_or_doubled() -> None:
    async with served() as it:
        (rank,) = await it.stage.group(Role.DECODE, "d", 1)
        # Together: all are opened in one instant, and not in the order of their numbers.
        rank.submit(*(Offer(room, 0, pages(room), 0) for room in random.Random(1).sample(range(1, 26), 25)))
        await eventually_async(lambda: len(it.stage.service.rooms.active) == 25)
        seen: list[str] = []
        after = ""
        count = 0
        while True:
            page = await it.get(f"/v1/handoffs?limit=10{after}")
            seen += [handoff["room"] for handoff in page["handoffs"]]
            count += 1
            if page["next"] is None:
                break
            after = f"&after={page['next']}"
        assert count == 3
        assert sorted(map(int, seen)) == list(range(1, 26))
        assert "must be what stood in next" in (await it.get("/v1/handoffs?after=12", 400))["error"]


async def test_an_operator_frees_a_stuck_request_and_every_rank_hears_why() -> None:
    async with served() as it:
        rooms = await in_every_state(it.stage)
        story = await it.post(f"/v1/handoffs/{rooms['waiting']}/cancel", data=b'{"why":"ticket 17"}')
        assert story["handoff"]["state"] == "failed"
        assert story["handoff"]["failure"]["reason"] == "cancelled_by_operator"
        prefill = [peer for peer in it.stage.peers if getattr(peer, "name", "") in {"p/0", "p/1"}]
        assert len(prefill) == 2
        for rank in prefill:
            outcome = await rank.outcome(rooms["waiting"])  # type: ignore[attr-defined]
            assert outcome.failure.message == "ticket 17"
            await rank.release(rooms["waiting"])  # type: ignore[attr-defined]
        assert "ended already" in (await it.post(f"/v1/handoffs/{rooms['waiting']}/cancel", 409))["error"]
        wrong = await it.post(f"/v1/handoffs/{rooms['open']}/cancel", 400, data=b'{"because":1}')
        assert "because" in wrong["error"]


async def test_nothing_new_is_admitted_between_drain_and_resume() -> None:
    async with served() as it:
        (rank,) = await it.stage.group(Role.DECODE, "d", 1)
        rank.offer(1, 1)
        await eventually_async(lambda: 1 in it.stage.service.rooms.active)
        assert await it.post("/v1/drain") == {"draining": True, "in_flight": 1}
        assert (await it.get("/readyz", 503))["reasons"] == ["draining: no new handoffs are admitted"]
        rank.offer(2, 2)
        assert await rank.failure(2) == "draining"
        assert 1 in it.stage.service.rooms.active, "what is in flight goes on"
        assert await it.post("/v1/resume") == {"draining": False, "in_flight": 1}
        rank.drain()
        rank.offer(3, 3)
        await eventually_async(lambda: 3 in it.stage.service.rooms.active)
        it.actions.ending = True
        assert "about to end" in (await it.post("/v1/resume", 409))["error"]


async def test_a_room_that_is_long_over_still_tells_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.rooms.RECENT", 1)
    async with served() as it:
        (rank,) = await it.stage.group(Role.DECODE, "d", 1)
        for room in (1, 2):
            rank.offer(room, room)
            rank.cancel(room, "no more")
            await rank.outcome(room)
        assert "story" in await it.get("/v1/handoffs/2")
        ended = await it.get("/v1/handoffs/1")
        assert ended["room"] == "1"
        assert ended["failure"]["message"] == "no more"


async def test_the_configuration_is_shown_without_its_secrets() -> None:
    secret = "x" * 20
    settings = config(
        http={"token": secret}, backend={"options": {"nixl": {"api_key": secret, "threads": 2}}}
    )
    async with served(settings) as it:
        shown = await it.get("/v1/config")
        assert secret not in str(shown)
        assert shown["http"]["token"] == SECRET
        assert shown["backend"]["options"]["nixl"] == {"api_key": SECRET, "threads": 2}
        assert shown["handoff"]["deadline_s"] == 300.0
