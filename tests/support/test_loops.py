"""The loops that tests run on are the loops that they claim to run on."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop


async def test_async_tests_run_on_both_loops(request: pytest.FixtureRequest) -> None:
    is_fast = isinstance(asyncio.get_running_loop(), uvloop.Loop)
    assert is_fast == ("uvloop" in request.node.name)
    assert ("standard" in request.node.name) != is_fast


@pytest.mark.uvloop
async def test_the_uvloop_mark_gives_uvloop() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


@pytest.mark.standard_loop
async def test_the_standard_mark_gives_the_standard_loop() -> None:
    assert isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)


@pytest.mark.looptime
async def test_virtual_time_passes_without_waiting() -> None:
    started = time.monotonic()
    loop_started = asyncio.get_running_loop().time()
    await asyncio.sleep(600)
    assert asyncio.get_running_loop().time() - loop_started >= 600
    assert time.monotonic() - started < 5
