"""What is wrong with a hello, field by field: what no rank of these tests' stages would ever say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from coordinator import acceptance
from coordinator.groups import Group, Rank
from coordinator.messages import EXTERNAL, Role
from tests.service.peers import LAYOUT, hello_of

if TYPE_CHECKING:
    from coordinator.messages import Hello


def said(role: Role, group: str = "g", **changes: object) -> Hello:
    """What the only rank of a group says, some of it changed."""
    return hello_of(role, group, 0, 1, **({"backend": "nixl", "transport": "ipc"} | changes))


def test_a_pool_that_no_worker_of_ours_maps_need_not_be_a_file() -> None:
    mapped = said(Role.PREFILL)
    external = said(Role.PREFILL, backend=EXTERNAL)
    assert "is no pool file of ours" in (acceptance.unmappable(mapped, "coordinator") or "")
    assert acceptance.unmappable(mapped, "rank") is None
    assert acceptance.unmappable(external, "coordinator") is None, "its engine moves the pages by itself"


@pytest.mark.parametrize("role", Role)
def test_planes_are_shared_out_evenly_over_the_regions(role: Role) -> None:
    known = said(role)
    for regions, told in ((4, None), (3, "pool: 4 planes cannot be shared out evenly over 3 regions")):
        hello = msgspec.structs.replace(known, pool=msgspec.structs.replace(known.pool, regions=regions))
        assert acceptance.unmappable(hello, "rank") == told


@pytest.mark.parametrize(
    ("role", "backend", "accepted"),
    [
        (Role.PREFILL, "", True),
        (Role.PREFILL, "nixl", True),
        (Role.PREFILL, "loopback", False),
        (Role.DECODE, "", False),
        (Role.DECODE, "nixl", True),
        (Role.DECODE, "loopback", False),
    ],
)
def test_only_a_prefill_rank_may_leave_the_backend_to_the_coordinator(
    role: Role, backend: str, *, accepted: bool
) -> None:
    problem = acceptance.malformed(said(role, backend=backend), "nixl")
    told = None if accepted else f"backend: this coordinator uses 'nixl', the rank has {backend!r}"
    assert problem == told


@pytest.mark.parametrize("role", Role)
def test_a_group_is_compared_with_those_of_the_other_side_that_are_there(role: Role) -> None:
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    large = msgspec.structs.replace(LAYOUT, page_tokens=2 * LAYOUT.page_tokens)
    known = said(other, "other", layout=large)
    group = Group(known)
    member = group.ranks[0] = Rank(group, known, b"", 0, 0.0)
    newcomer = said(role)
    assert "does not fit other: page_tokens" in (acceptance.incompatible(newcomer, {"other": group}) or "")
    assert acceptance.incompatible(newcomer, {"g": Group(newcomer), "other": group}) is None, "known before"
    member.alive = False
    assert acceptance.incompatible(newcomer, {"other": group}) is None
