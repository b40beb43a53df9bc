"""The web page: what it needs comes from us alone, and a real browser shows what is so."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path
from typing import Final

import pytest

from tests.http import browser
from tests.http.served import in_every_state, served
from tests.service.stage import config
from tests.support.waiting import eventually_async

#: Where the screenshot is kept: the directory of a CI job's artefacts, or this one.
ARTEFACTS: Final = os.environ.get("KV_COORDINATOR_ARTEFACTS", "")


async def test_the_pages_files_are_served_and_name_no_other_host() -> None:
    async with served() as it:
        text = await it.get("/")
        assert text.startswith("<!doctype html>")
        for name in ("page.js", "page.css", "icon.svg"):
            assert f"page/{name}" in text
            assert await it.get(f"/page/{name}")
        await it.get("/page/../server.py", 404)
    for file in resources.files("coordinator.http").joinpath("page").iterdir():
        content = file.read_text()
        urls = re.findall(r"https?://[^\"'\s)]+", content)
        assert [url for url in urls if url != "http://www.w3.org/2000/svg"] == [], file.name


async def test_the_page_may_load_nothing_from_elsewhere() -> None:
    async with served() as it, it.client.get(it.server.url) as answer:
        assert answer.content_type == "text/html"
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]


@pytest.mark.uvloop
@pytest.mark.timeout(180)
async def test_a_browser_shows_who_waits_for_whom_and_frees_a_request(
    tmp_path: Path, short_dir: Path
) -> None:
    binary = browser.program()
    if binary is None:
        pytest.skip("there is no chromium here (Debian package chromium), so the page was not looked at")
    # What is held is to be held until the browser has started, which takes long on a busy host.
    patient = config(release={"settle_s": 60.0}, handoff={"stall_s": 60.0})
    async with served(patient) as it, browser.browsing(binary, short_dir) as page:
        rooms = await in_every_state(it.stage)
        await page.open(it.server.url)
        await page.until("document.body?.dataset.looked > 0", 40)
        kinds = await page.value(
            "Object.fromEntries([...document.querySelectorAll('[data-room]')].map(r => "
            "[r.dataset.room, r.dataset.kind]))"
        )
        assert kinds == {
            str(rooms["open"]): "open",
            str(rooms["waiting"]): "decode",
            str(rooms["moving"]): "moving",
            str(rooms["held"]): "held",
        }
        assert await page.value("document.getElementById('verdict').textContent") == "ready"
        assert "cancelled_by_prefill" in await page.value("document.getElementById('failures').textContent")
        assert await page.value("document.querySelectorAll('.rank').length") == 4
        waiting = f"document.querySelector('[data-room=\"{rooms['waiting']}\"]')"
        assert "the offer of any decode group" in await page.value(f"{waiting}.textContent")
        await page.value(f"{waiting}.click()")
        await page.until("document.getElementById('story-ranks').textContent.includes('p/1')")
        kept = Path(ARTEFACTS) if ARTEFACTS else tmp_path
        await page.screenshot(kept / "operators-page.png")
        assert (kept / "operators-page.png").stat().st_size > 20_000
        # It is freed here, and shown as it is now, without a new load of the page.
        await page.value(
            "document.getElementById('why').value = 'ticket 17';"
            "document.getElementById('cancel').requestSubmit()"
        )
        await eventually_async(lambda: rooms["waiting"] not in it.stage.service.rooms.active)
        await page.until("document.getElementById('story-summary').textContent.includes('ticket 17')")
        await page.until(f"!{waiting}")
        await it.post("/v1/drain")
        await page.until("document.getElementById('verdict').textContent === 'not ready'")
        await page.until("document.getElementById('reasons').textContent.includes('draining')")
        assert page.complaints == []
        assert page.hosts == {it.server.url.removeprefix("http://")}
