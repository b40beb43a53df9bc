"""An engine that has given up on its coordinator comes back as a later life (see ``Hello.life``).

All its ranks have failed what was in flight, in the same step, so its group begins anew as a whole:
with members, a log and numbers of its own. The former members are lost; nothing that is told to them,
or that still arrives from them, is about the group that follows. A rank that alone started over in a
group that goes on would hear of rooms that it has given up, and miss others that it has not.

A live rank is never pushed out by a newcomer, but for itself: by the process that it runs in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.groups import Group
from coordinator.logs import get_logger
from coordinator.membership import restart_reason
from coordinator.messages import Refused

if TYPE_CHECKING:
    from coordinator.groups import Rank
    from coordinator.membership import Membership
    from coordinator.messages import Hello
    from coordinator.reattach import Reattach

_log = get_logger()


def succeed(membership: Membership, reattach: Reattach, hello: Hello) -> Refused | None:
    """Let a group make way for its own later life; returns what to answer to a hello of another life.

    None is for a hello of the group's present life. Whether it is acceptable is still to be seen.
    """
    reattach.forsake(hello.group, hello.life)
    group = membership.groups.get(hello.group)
    if group is None:
        return None
    if hello.instance in group.former or (hello.memory is not None and hello.life < group.life):
        message = f"{hello.group} has given up on this coordinator and began anew; this is of its former life"
        return membership.refused(hello, "outlived", message, fatal=False)
    holder = group.ranks[hello.rank] if hello.rank < group.world_size else None
    is_itself = holder is not None and holder.hello.process == hello.process
    if not _is_later(group, holder if is_itself else None, hello) or membership.unusable(hello) is not None:
        return None
    if not is_itself and any(membership.confirm_alive(rank) for rank in group.live):
        return Refused("contested", f"members of a former life of {hello.group} are still there")
    _begin_anew(membership, group, hello)
    return None


def _is_later(group: Group, itself: Rank | None, hello: Hello) -> bool:
    """Whether a hello is of a later life than its group's; ``itself`` is what its process was before."""
    if itself is None:
        return hello.life > group.life
    return hello.instance != itself.hello.instance and hello.life > itself.hello.life


def _begin_anew(membership: Membership, group: Group, hello: Hello) -> None:
    members = [rank for rank in group.ranks if rank is not None]
    message = f"{group.name} has given up on this coordinator and begins anew"
    for rank in members:
        membership.lose(rank, restart_reason(rank), message, gone=True)
    successor = membership.groups[group.name] = Group(hello)
    # Its own count: a rank that was new in the former life may know a lower one.
    successor.life = max(group.life + 1, hello.life)
    successor.former = {rank.hello.instance for rank in members}
    _log.warning("group.begins_anew", group=group.name, life=successor.life)
