"""How ``kv-coordinator plan`` shows what a handoff amounts to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from coordinator.sizing import refusal, sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from coordinator.sizing import LegSize, Side


def show(console: Console, prefill: Side, decode: Side, tokens: int) -> bool:
    """Print the plan, or why there is none; whether there is one."""
    problems = refusal(prefill, decode)
    if problems:
        console.print("These engines cannot hand over to one another:", highlight=False)
        for problem in problems:
            console.print(f"  {problem}", highlight=False, markup=False, soft_wrap=True)
        return False
    legs = sizes(prefill, decode, tokens)
    page_tokens = prefill.layout.page_tokens
    pages = -(-tokens // page_tokens)
    console.print(
        f"A handoff of {tokens:,} tokens is {pages:,} pages of {page_tokens} tokens, over {len(legs)} legs.",
        highlight=False,
    )
    console.print(_legs(legs))
    console.print(_ranks(prefill, decode, legs))
    console.print(
        "Scattered and merged are descriptors, pieces that a transfer engine is told to copy: when no two "
        "pages follow one another on both sides, and when all do.",
        highlight=False,
    )
    return True


def _legs(legs: Sequence[LegSize]) -> Table:
    table = Table(title="Legs", title_justify="left")
    for name in ("prefill", "decode", "layers", "heads", "bytes", "scattered", "merged"):
        table.add_column(name, justify="right", no_wrap=True)
    for leg in legs:
        table.add_row(
            str(leg.source),
            str(leg.destination),
            _span(leg.layers),
            _span(leg.heads),
            f"{leg.size_bytes:,}",
            f"{leg.scattered:,}",
            f"{leg.merged:,}",
        )
    return table


def _ranks(prefill: Side, decode: Side, legs: Sequence[LegSize]) -> Table:
    table = Table(title="Ranks", title_justify="left")
    for name in ("rank", "bytes", "scattered", "merged", "pool, a token"):
        table.add_column(name, justify="left" if name == "rank" else "right", no_wrap=True)
    for name, side in (("prefill", prefill), ("decode", decode)):
        for rank in range(side.world_size):
            own = [leg for leg in legs if rank == (leg.source if side is prefill else leg.destination)]
            table.add_row(
                f"{name} {rank} {'sends' if side is prefill else 'receives'}",
                f"{sum(leg.size_bytes for leg in own):,}",
                f"{sum(leg.scattered for leg in own):,}",
                f"{sum(leg.merged for leg in own):,}",
                f"{side.layout.pool_bytes(1, side.world_size, rank) / side.layout.page_tokens:,.0f} bytes",
            )
    return table


def _span(ends: tuple[int, int]) -> str:
    first, last = ends
    return str(first) if first == last else f"{first}-{last}"
