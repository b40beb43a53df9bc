"""A configuration is checked without loading anything that moves bytes."""

from __future__ import annotations

import subprocess
import sys


def test_the_configuration_loads_no_native_library() -> None:
    code = (
        "import sys; from coordinator.config import parse; parse('[backend]\\nname = \"nixl\"');"
        "print([m for m in sys.modules if m.split('.')[0] in {'numpy', 'torch', 'nixl', 'nixl_cu12', 'zmq'}])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
