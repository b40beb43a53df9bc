"""Imports SGLang once, which takes half a minute, and forks the ranks of engines from there.

Reads JSON lines: ``{"ranks": 2, "place": directory, "port": 1, "decode": 2, "env": {...}}`` forks an engine,
and answers with the pids. It ends with its input. Runs in SGLang's environment only.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import sglang.srt.managers.scheduler  # noqa: F401 - the plugin looks whether it is there

from tests.sglang import engine


def main() -> None:
    """Serve until the input ends."""
    pids: list[int] = []
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        born = [_fork(rank, wanted) for rank in range(wanted["ranks"])]
        pids += born
        print(json.dumps(born), flush=True)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue


def _fork(rank: int, wanted: dict[str, Any]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code, place = 1, wanted["place"]
    try:
        os.environ.update(wanted["env"])
        log = os.open(f"{place}/log-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(0)
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True
        )
        engine.run(rank, wanted["ranks"], place, wanted["port"], wanted["decode"])
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it was, the child must not go on as its parent
        traceback.print_exc()
    Path(f"{place}/ended-{rank}").write_text(str(code))
    os._exit(code)


if __name__ == "__main__":
    main()
