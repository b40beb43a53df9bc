"""Files that a run writes in the end: what cannot be written is to be known before it begins."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def why_not_writable(path: Path) -> str:
    """Say in a few words why a file cannot be written; empty: nothing speaks against it."""
    if not path.absolute().parent.is_dir():
        return "there is no such directory"
    if path.is_dir():
        return "it is a directory"
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        return "permission denied"
    return ""
