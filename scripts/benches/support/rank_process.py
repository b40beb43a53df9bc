"""The process of one rank in a bench: ``python -m``, with its parent's pid and its settings.

It joins the coordinator and then runs ``engine(rank, driver)`` of the bench's module: what the rank
does there, told by and telling the driver over ``driver``. A bench that touches the pages has
``pool_engine(rank, pool, driver)`` instead. The process ends when that returns, when the driver hangs
up, or when the driver has ended.
"""

from __future__ import annotations

import gc
import logging
import socket
import sys
from contextlib import ExitStack
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Final

import msgspec

from coordinator.client import ClientSettings, DecodeRank, Endpoint, KVPool, Layout, PrefillRank
from coordinator.messages import Role
from coordinator.sim import leash

READY_S: Final = 60.0


class RankSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank, as JSON.

    Attributes:
        bench: the module whose ``engine`` is run.
        role: prefill or decode.
        group: name of its engine.
        rank: its number.
        world_size: ranks in its engine.
        control: address of the coordinator.
        driver: path of the driver's socket.
        backend: name of the transfer backend.
        options: of the backend, for a decode rank.
        layout: of its pool.
        pages: in its pool.

    """

    bench: str
    role: Role
    group: str
    rank: int
    world_size: int
    control: str
    driver: str
    backend: str
    layout: Layout
    pages: int
    options: dict[str, object] = {}


def main() -> None:
    """Run one rank."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    parent, text = sys.argv[1:]
    leash.follow(int(parent))
    settings = msgspec.json.decode(text, type=RankSettings)
    bench = import_module(settings.bench)
    with ExitStack() as cleanup:
        driver = cleanup.enter_context(_connect_driver(settings.driver))
        driver.send((settings.group, settings.rank))
        pool = cleanup.enter_context(KVPool.allocate(settings.layout, settings.pages, settings.world_size))
        rank = _join(settings, pool, cleanup)
        rank.wait_ready(READY_S)
        # As engines do once they have warmed up: what was loaded is not to be collected again and again.
        gc.freeze()
        driver.send("ready")
        try:
            if hasattr(bench, "pool_engine"):
                bench.pool_engine(rank, pool, driver)
            else:
                bench.engine(rank, driver)
        except (EOFError, BrokenPipeError):
            # The driver has what it wants, or is gone.
            return


def _connect_driver(path: str) -> Connection:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        return Connection(connection.detach())


def _join(settings: RankSettings, pool: KVPool, cleanup: ExitStack) -> PrefillRank | DecodeRank:
    # A bench may start many processes at a time on few cores: a slow answer is no absence.
    bounds = ClientSettings(away_after_s=30.0, hello_retry_s=5.0, resend_after_s=30.0)
    if settings.role is Role.PREFILL:
        return cleanup.enter_context(
            PrefillRank.connect(
                settings.control,
                group=settings.group,
                rank=settings.rank,
                world_size=settings.world_size,
                pool=pool,
                settings=bounds,
            )
        )
    endpoint = cleanup.enter_context(Endpoint(pool, settings.backend, settings.options))
    return cleanup.enter_context(
        DecodeRank.connect(
            settings.control,
            group=settings.group,
            rank=settings.rank,
            world_size=settings.world_size,
            endpoint=endpoint,
            settings=bounds,
        )
    )


if __name__ == "__main__":
    main()
