"""Reads what is checked of a Markdown page: its blocks of code, its tables, its links."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
README: Final = ROOT / "README.md"

_FENCE: Final = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING: Final = re.compile(r"^#+ +(?P<title>.+)$", re.MULTILINE)
_LINK: Final = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_TICKED: Final = re.compile(r"`([^`\n]+)`")


@cache
def readme() -> str:
    """The text of README.md."""
    return README.read_text()


def section(title: str) -> str:
    """Everything from the heading ``title`` up to the next one of its level."""
    text = readme()
    start = text.index(f"\n## {title}\n")
    end = text.find("\n## ", start + 1)
    return text[start:] if end < 0 else text[start:end]


def blocks(text: str, language: str = "") -> list[str]:
    """The blocks of code in that language; without one, those that name none."""
    return [match["code"] for match in _FENCE.finditer(text) if match["language"] == language]


def program(name: str) -> str:
    """The block of Python that begins with the comment ``# name``."""
    (found,) = [code for code in blocks(readme(), "python") if code.startswith(f"# {name}\n")]
    return found


def table(text: str, first_column: str) -> list[list[str]]:
    """The rows of the table whose first column is called so, without its head, as text."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def ticked(text: str) -> list[str]:
    """Everything between single backticks, outside of blocks of code."""
    return _TICKED.findall(_FENCE.sub("", text))


def links(text: str) -> list[str]:
    """The targets of all links, outside of blocks of code."""
    return [match["target"] for match in _LINK.finditer(_FENCE.sub("", text))]


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get where it is shown."""
    titles = [match["title"] for match in _HEADING.finditer(_FENCE.sub("", text))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@cache
def source() -> str:
    """The text of all modules of ``coordinator``."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "coordinator").rglob("*.py")))
