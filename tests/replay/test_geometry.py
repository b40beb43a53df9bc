"""Sizes of pages and pools: a layout is cut until it fits, and not more."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from coordinator import presets
from coordinator.layout import Layout
from coordinator.replay.errors import ReplayError
from coordinator.replay.geometry import fitting_bytes, page_bytes, pool_pages, scaled
from coordinator.replay.trace import Prompt

LLAMA = presets.load("Llama-3.1-8B")


def test_a_page_that_is_small_enough_is_left_alone() -> None:
    assert scaled(LLAMA, 2 << 20, [1, 2]) is LLAMA
    assert page_bytes(LLAMA, 2) == 2 << 20


@pytest.mark.parametrize("limit_bytes", [1 << 20, 65536, 5000, 4096, 512])
@pytest.mark.parametrize("name", presets.names())
def test_a_page_is_cut_to_the_limit_and_its_tokens_and_heads_stay(name: str, limit_bytes: int) -> None:
    layout = presets.load(name)
    cut = scaled(layout, limit_bytes, [1, 2])
    taken_bytes = max(page_bytes(cut, 1), page_bytes(cut, 2))
    assert limit_bytes / 2 < taken_bytes <= limit_bytes
    same = (cut.page_tokens, cut.kv_heads, cut.dtype, cut.kv)
    assert same == (layout.page_tokens, layout.kv_heads, layout.dtype, layout.kv)
    cut.check(2)


def test_a_page_that_cannot_be_cut_that_much_is_refused() -> None:
    with pytest.raises(ReplayError, match=re.escape("takes 512 bytes at least; 511 are too few")):
        scaled(LLAMA, 511, [1])


def test_several_of_the_longest_prompts_fit_into_a_pool() -> None:
    layout = Layout(layers=1, page_tokens=16, kv_heads=1, head_size=1, dtype="uint8")
    assert pool_pages([Prompt(0, 1000, 1, ()), Prompt(0, 33, 1, ())], layout) == 8 * 63
    assert pool_pages([Prompt(0, 1, 1, ())], layout) == 64


def test_pools_take_a_part_of_the_free_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=8, f_frsize=1 << 20))
    assert fitting_bytes(pages=1024, engines=2) == 2048
    with pytest.raises(ReplayError, match="too few for 8192 pools"):
        fitting_bytes(pages=1024, engines=8192)
