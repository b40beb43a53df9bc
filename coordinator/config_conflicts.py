"""Combinations of settings that cannot work, each of which is fine by itself."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from backends import registry
from coordinator import addresses
from coordinator.config_problems import Problem, did_you_mean, dotted
from coordinator.messages import EXTERNAL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from coordinator.addresses import Address
    from coordinator.config import Config, Security

#: A rank is lost after this many heartbeats at the least; one may always be late.
_MIN_BEATS = 3
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def find(config: Config) -> Iterator[Problem]:
    """Yield every combination in ``config`` that cannot work."""
    yield from _bounds(config)
    yield from _backend(config)
    yield from _listen(config)
    yield from _http(config)
    if config.security is not None:
        yield from _security(config.security)


def _problem(text: str, key: str, *others: str, where: str = "") -> Problem:
    """Make a problem of keys of ours, none of which holds a dot; it is told under ``where``."""
    return Problem(where or key, text, tuple(tuple(name.split(".")) for name in (key, *others)))


def _bounds(config: Config) -> Iterator[Problem]:
    handoff, rank, release = config.handoff, config.rank, config.release
    if handoff.deadline_s > handoff.hard_cap_s:
        yield _problem(
            f"is {handoff.deadline_s:g}, must not be over handoff.hard_cap_s ({handoff.hard_cap_s:g})",
            "handoff.deadline_s",
            "handoff.hard_cap_s",
        )
    if rank.lost_after_s < _MIN_BEATS * rank.heartbeat_s:
        yield _problem(
            f"is {rank.lost_after_s:g}, must be at least {_MIN_BEATS} times rank.heartbeat_s "
            f"({rank.heartbeat_s:g}): a rank is not dead because one heartbeat is late",
            "rank.lost_after_s",
            "rank.heartbeat_s",
        )
    if release.unproven_s is not None and release.unproven_s < release.settle_s:
        yield _problem(
            f"is {release.unproven_s:g}, must be at least release.settle_s ({release.settle_s:g}): so long "
            "it is waited for in any case",
            "release.unproven_s",
            "release.settle_s",
        )
    if rank.reattach_s < rank.heartbeat_s:
        yield _problem(
            f"is {rank.reattach_s:g}, must be at least rank.heartbeat_s ({rank.heartbeat_s:g}): "
            "a rank learns of a restarted coordinator with its next heartbeat",
            "rank.reattach_s",
            "rank.heartbeat_s",
        )
    if handoff.offer_ttl_s < rank.reattach_s:
        yield _problem(
            f"is {handoff.offer_ttl_s:g}, must be at least rank.reattach_s ({rank.reattach_s:g}): "
            "after a restart every offer would be dropped before prefill may have reported",
            "handoff.offer_ttl_s",
            "rank.reattach_s",
        )


def _backend(config: Config) -> Iterator[Problem]:
    known = [*registry.names(), EXTERNAL]
    if config.backend.name not in known:
        yield _problem(_unknown_backend(config.backend.name, known), "backend.name")
    for name in config.backend.options:
        where = dotted(("backend", "options", name))
        if name not in known:
            yield _problem(_unknown_backend(name, known), "backend.options", where=where)
        elif name == EXTERNAL:
            text = "has no options: the engine moves the pages by itself"
            yield _problem(text, "backend.options", where=where)


def _unknown_backend(name: str, known: list[str]) -> str:
    hint = did_you_mean(name, known)
    return f"there is no backend {name!r}{hint or ';'} installed: {', '.join(known)}"


def _listen(config: Config) -> Iterator[Problem]:
    listen = config.listen
    parsed: dict[str, Address] = {}
    for key, texts in (("listen.control", listen.control), ("listen.outcomes", listen.outcomes)):
        for index, text in enumerate(texts):
            where = f"{key}[{index}]"
            try:
                parsed[where] = addresses.split(text)
            except ValueError as error:
                yield _problem(f"is {error}", key, where=where)
    yield from _reachable(config, parsed)
    yield from _taken_twice(parsed)
    offered = {addresses.transport(text) for text in listen.outcomes}
    for index, text in enumerate(listen.control):
        if addresses.transport(text) not in offered and f"listen.control[{index}]" in parsed:
            yield _problem(
                f"has no {addresses.transport(text)} address, but listen.control[{index}] is {text}: "
                "who comes that way must be able to subscribe",
                "listen.outcomes",
                "listen.control",
            )


def _reachable(config: Config, parsed: dict[str, Address]) -> Iterator[Problem]:
    for where, address in parsed.items():
        owner = where.partition("[")[0]
        if address.wildcard and not config.listen.advertise:
            yield _problem(
                f"is on every interface ({address.host}), which is no address to connect to: "
                "set listen.advertise to this host's name",
                owner,
                "listen.advertise",
                where=where,
            )
        if not address.local and config.security is None:
            yield _problem(
                f"can be reached from other hosts ({address.host}): set security.server_key and "
                "security.client_keys, or use ipc:// or tcp://127.0.0.1",
                owner,
                "security",
                where=where,
            )


def _http(config: Config) -> Iterator[Problem]:
    http = config.http
    if http.token and http.token_file is not None:
        twice = "cannot stand beside http.token: only one of them is used"
        yield _problem(twice, "http.token_file", "http.token")
    if http.token_file is not None:
        # Its group may read it: in a pod, a secret's files belong to root and to the pod's group.
        yield from _private_file(http.token_file, "http.token_file", stat.S_IRWXO | stat.S_IWGRP)
    if not http.address:
        return
    try:
        address = addresses.split(f"tcp://{http.address}")
    except ValueError as error:
        yield _problem(f"is {http.address!r}, of which {error}", "http.address")
        return
    if not (address.local or http.token or http.token_file is not None):
        yield _problem(
            f"can be reached from other hosts ({address.host}): set http.token_file, or use 127.0.0.1",
            "http.address",
            "http.token",
            "http.token_file",
        )


def _taken_twice(parsed: dict[str, Address]) -> Iterator[Problem]:
    first: dict[Address, str] = {}
    for where, address in parsed.items():
        if address in first and not (address.transport == "tcp" and address.port == 0):
            owners = (where.partition("[")[0], first[address].partition("[")[0])
            twice = f"is the same address as {first[address]}; each needs its own"
            yield _problem(twice, *owners, where=where)
        first.setdefault(address, where)


def _security(security: Security) -> Iterator[Problem]:
    yield from _private_file(security.server_key, "security.server_key")
    if not security.client_keys.is_dir():
        yield _problem(f"is {str(security.client_keys)!r}, must be a directory", "security.client_keys")


def _private_file(path: Path, key: str, others: int = _OTHERS) -> Iterator[Problem]:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        yield _problem(f"{str(path)!r} cannot be read: {error.strerror}", key)
        return
    if not stat.S_ISREG(mode):
        yield _problem(f"is {str(path)!r}, must be a file", key)
    elif mode & others:
        yield _problem(f"{str(path)!r} can be read by others (mode {mode & 0o777:o}): chmod 600 it", key)
