"""An engine that has given up on its coordinator comes back as a later life (see ``Hello.life``).

All its ranks have failed what was in flight, in the same step, so its group begins anew as a whole:
with members, a log and numbers of its own. The former members are lost; nothing that is told to them,
or that still arrives from them, is about the group that follows. (A rank that alone started over in a
group that goes on would hear of rooms that it has given up, and miss others that it has not.) A rank
whose engine is about to follow the others, but has not yet, must not be among them before it has.

A live rank is never pushed out by a newcomer, but for itself: by the process that it runs in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from coordinator.groups import Group
from coordinator.logs import get_logger
from coordinator.membership import restart_reason
from coordinator.messages import Refused

if TYPE_CHECKING:
    from coordinator.membership import Membership
    from coordinator.messages import Hello
    from coordinator.reattach import Reattach

_log = get_logger()


def succeed(membership: Membership, reattach: Reattach, hello: Hello) -> Refused | None:
    """Let a group make way for its own later life; returns what to answer to a hello of another life.

    None is for a hello of the group's present life. Whether it is acceptable is still to be seen.
    """
    group = membership.groups.get(hello.group)
    life = reattach.forsake(hello.group, hello.life)
    if group is not None:
        life = max(life, group.life)
    if hello.life < life and (group is None or any(membership.confirm_alive(rank) for rank in group.live)):
        message = f"{hello.group} has given up on a coordinator {life} times, this rank {hello.life} times"
        refused = membership.refused(hello, "outlived", message, fatal=False)
        return msgspec.structs.replace(refused, life=life)
    if group is None or hello.life == group.life or membership.unusable(hello) is not None:
        return None
    # Nobody lives of an engine that had come further: this is a new one under its name.
    holder = group.ranks[hello.rank]
    is_itself = holder is not None and holder.hello.process == hello.process
    if not is_itself and any(membership.confirm_alive(rank) for rank in group.live):
        return Refused("contested", f"members of a former life of {hello.group} are still there")
    _begin_anew(membership, group, hello)
    return None


def _begin_anew(membership: Membership, group: Group, hello: Hello) -> None:
    message = f"{group.name} has given up on this coordinator and begins anew"
    for rank in group.ranks:
        if rank is not None:
            membership.lose(rank, restart_reason(rank), message, gone=True)
    membership.groups[group.name] = Group(hello)
    _log.warning("group.begins_anew", group=group.name, life=hello.life)
