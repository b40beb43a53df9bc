"""A headless Chromium, driven over its own protocol with the client that is here anyway."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import re
import shutil
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

#: Until the program has started, on a host that does much else.
START_S: Final = 40.0
ANSWER_S: Final = 30.0


def program() -> str | None:
    """Where Chromium is; None where it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One tab.

    Attributes:
        complaints: what the page wrote to its console as an error, and exceptions.
        hosts: whom it asked for something.

    """

    def __init__(self, line: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self._line = line
        self._numbers = itertools.count(1)

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Have the browser do something."""
        number = next(self._numbers)
        await self._line.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(ANSWER_S):
            while True:
                message = await self._line.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message
                    return dict(message["result"])
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.complaints.append(str(parameters["entry"]["text"]))
            case "Network.requestWillBeSent":
                self.hosts.add(parameters["request"]["url"].split("/")[2])

    async def open(self, url: str) -> None:
        """Go to a page."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:  # noqa: ANN401 - whatever the page has
        """Work out an expression in the page."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 20.0) -> Any:  # noqa: ANN401 - as above
        """Wait until an expression is true in the page."""
        async with asyncio.timeout(timeout_s):
            # The page is another process: it has no event for us.
            while not (value := await self.value(expression)):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
        return value

    async def screenshot(self, file: Path) -> None:
        """Keep what is to be seen."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(answer["data"]))  # noqa: ASYNC240 - as above


@asynccontextmanager
async def browsing(binary: str, directory: Path) -> AsyncIterator[Page]:
    """Start a browser with one empty tab; nothing of it is left at the end.

    ``directory`` must have a short path: it gets sockets.
    """
    process = await asyncio.create_subprocess_exec(
        binary,
        "--headless=new",
        "--no-sandbox",  # a test may run as root, in a container
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--no-proxy-server",
        "--remote-debugging-port=0",
        f"--user-data-dir={directory}/profile",
        "--window-size=1360,1000",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        # Killed, it would leave its sockets where it finds this.
        env={**os.environ, "TMPDIR": str(directory)},
    )
    try:
        assert process.stderr is not None
        address = await _address(process.stderr)
        async with aiohttp.ClientSession(trust_env=False) as client:
            async with client.get(f"http://{address}/json/list") as answer:
                (tab, *_) = [tab for tab in await answer.json() if tab["type"] == "page"]
            async with client.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=64 << 20) as line:
                yield Page(line)
    finally:
        with contextlib.suppress(ProcessLookupError):
            # It has children of its own; all are in its session.
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


async def _address(output: asyncio.StreamReader) -> str:
    """Wait until the browser says where it listens."""
    said = b""
    async with asyncio.timeout(START_S):
        while line := await output.readline():
            said += line
            found = re.search(rb"DevTools listening on ws://([^/]+)/", line)
            if found:
                return found[1].decode()
    message = f"the browser ended before it listened: {said.decode(errors='replace')}"
    raise AssertionError(message)
