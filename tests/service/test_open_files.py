"""A coordinator takes more connections than the limit that programs usually begin with."""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import psutil

from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.processes import Programs

#: The limit that it is started with.
SOFT: Final = 64
CONNECTIONS: Final = 4 * SOFT
LIMITED: Final = f'ulimit -Sn {SOFT}; exec "$0" "$@"'


def test_more_connections_than_the_first_limit_are_taken(programs: Programs, short_dir: Path) -> None:
    """Beyond it libzmq would end the process."""
    file = short_dir / "config.toml"
    file.write_text(
        f'[listen]\ncontrol = ["ipc://{short_dir}/control"]\noutcomes = ["ipc://{short_dir}/outcomes"]\n'
        '[http]\naddress = ""\n[shutdown]\ngrace_s = 0.1\n'
    )
    serve = (sys.executable, "-m", "coordinator", "serve", "--config", str(file))
    program = programs.start("sh", "-c", LIMITED, *serve)
    program.says("coordinator.ready", 20)
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            line = stack.enter_context(socket.socket(socket.AF_UNIX))
            line.connect(f"{short_dir}/control")
        process = psutil.Process(program.process.pid)
        eventually(lambda: process.num_fds() > CONNECTIONS, 10, "all connections are taken")
        program.process.send_signal(signal.SIGTERM)
        assert program.wait() == 0
