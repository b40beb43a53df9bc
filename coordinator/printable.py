"""Texts of others, as a terminal may have them: what would move its cursor or worse is written out."""

from __future__ import annotations

import json


def printable(text: str) -> str:
    r"""Return the text with its escape for each character that is not printable, such as ``\x1b``."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def printable_lines(text: str) -> str:
    """Return the same of a text whose lines are to stay, such as a traceback."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(text: str) -> str:
    r"""Return the same of JSON, by escapes of JSON such as ``\u009b``: it means what it has meant."""
    if text.isprintable():
        return text
    return "\n".join(
        "".join(
            # All that is left as it is of what is not printable is DEL.
            character if character.isprintable() else json.dumps(character)[1:-1].replace("\x7f", "\\u007f")
            for character in line
        )
        for line in text.split("\n")
    )
