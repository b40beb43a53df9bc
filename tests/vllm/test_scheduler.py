"""The scheduler's half in the real ``Scheduler`` of each version of vLLM that the connector is for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.vllm.rig import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_the_scheduler_of(version: str, python: str, model: Path) -> None:
    other = Path(python).parents[1] / f"vllm-{version}"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{other}" if other.exists() else str(ROOT),
        "KV_COORDINATOR_MODEL": str(model),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    found = subprocess.run(
        [python, "-c", "import vllm; print(vllm.__version__)"],
        env=environment, capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    assert found.stdout.strip() == version
    done = subprocess.run(
        [
            python, "-m", "pytest", "-q", "--noconftest", "-c", "/dev/null", "--rootdir", str(ROOT),
            "-p", "no:cacheprovider", str(ROOT / "tests" / "vllm" / "inside" / "check_scheduler.py"),
        ],
        env=environment, capture_output=True, text=True, check=False, cwd=ROOT, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
