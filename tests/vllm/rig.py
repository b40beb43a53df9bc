"""Real vLLM engines on CPU, a coordinator, and what tests ask them."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path(__file__).parents[2]
#: How long an engine may take to start, on two cores that others use too.
START_S: Final = 600.0
#: For what takes a moment.
PATIENCE_S: Final = 60.0
#: After which silence somebody is lost, where a test does not say so: a busy host may stand still for long.
LOST_S: Final = 300.0
BLOCK_TOKENS: Final = 32
CONNECTOR: Final = "KVCoordinatorConnector"
MODULE: Final = "coordinator.integrations.vllm.connector"


def python_with_vllm() -> str | None:
    """The python of the environment that ``scripts/vllm-env`` makes; None where it was not made."""
    found = subprocess.run(
        [str(ROOT / "scripts" / "vllm-env"), "--if-there"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None if found.returncode == 0 else None


def until(condition: Callable[[], Any], what: str, bound_s: float = PATIENCE_S) -> Any:
    """Wait for a condition; returns what it returned."""
    end_s = time.monotonic() + bound_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not within {bound_s:g} s: {what}"
        time.sleep(0.05)
    return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Answer(NamedTuple):
    """What an engine has answered: the HTTP status, and the body."""

    status: int
    body: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        """The tokens of its only choice."""
        assert self.status == 200, self.body
        found: list[int] = self.body["choices"][0]["token_ids"]
        return found

    @property
    def params(self) -> dict[str, Any]:
        """What prefill wants decode to be told."""
        assert self.status == 200, self.body
        found: dict[str, Any] = self.body["kv_transfer_params"]
        return found


def call(port: int, method: str, path: str, body: object = None, timeout_s: float = 120.0) -> tuple[int, str]:
    """Make an HTTP call on this host; returns the status and the text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


class Group:
    """A program with all its processes, which end with it."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env={**os.environ, **environment}, cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes, but for those that clean up behind the others."""
        for member in self._members():
            with contextlib.suppress(psutil.Error):
                if not any("resource_tracker" in word for word in member.cmdline()):
                    member.send_signal(number)

    def _members(self) -> list[psutil.Process]:
        """All its processes."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self, patience_s: float = 10.0) -> None:
        """End it: politely, then by force."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        self.signal(signal.SIGKILL)
        self.process.wait()
        until(lambda: not self._members(), f"the end of all processes of {self.log.name}")


class Coordinator:
    """``kv-coordinator serve`` for vLLM's engines."""

    def __init__(self, place: Path, backend: str = "nixl", deadline_s: float = 300.0, **options: Any) -> None:
        self.address = f"ipc://{place}/control"
        self.http = free_port()
        written = "\n".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
        self._file = place / "coordinator.toml"
        self._file.write_text(f"""
            [backend]
            name = "{backend}"
            hosting = "rank"
            [backend.options.{backend}]
            {written}
            [listen]
            control = ["{self.address}"]
            outcomes = ["ipc://{place}/outcomes"]
            [http]
            address = "127.0.0.1:{self.http}"
            [handoff]
            deadline_s = {deadline_s}
            offer_ttl_s = {deadline_s}
            [rank]
            heartbeat_s = 0.5
            reattach_s = 2.0
            lost_after_s = {LOST_S}
            [release]
            settle_s = 1.0
            drain_s = 1.0
        """)
        self.log = place / "coordinator.log"
        self.start()

    def start(self) -> None:
        """Start it (again)."""
        self._group = Group(
            [sys.executable, "-m", "coordinator", "serve", "--config", str(self._file)],
            self.log, {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._group.end()

    def kill(self) -> None:
        """SIGKILL."""
        self._group.signal(signal.SIGKILL)
        self._group.process.wait()

    def get(self, path: str) -> Any:
        """Ask it."""
        status, text = call(self.http, "GET", path)
        assert status == 200, text
        return json.loads(text)


def _write_plugin(site: Path) -> None:
    """Have every process of an engine load ``blocking``; by this, vLLM finds plugins."""
    metadata = site / "blocking-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: blocking\nVersion: 0\n")
    entry = "[vllm.general_plugins]\nblocking = tests.vllm.blocking:register\n"
    (metadata / "entry_points.txt").write_text(entry)


class Engine:
    """One ``vllm serve``."""

    _numbers = itertools.count(1)

    def __init__(
        self,
        python: str,
        model: Path,
        place: Path,
        *,
        tp: int = 1,
        transfer: dict[str, Any] | None = None,
        arguments: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.log = place / f"engine-{next(Engine._numbers)}.log"
        command = [
            python, "-m", "vllm.entrypoints.cli.main", "serve", str(model),
            "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny",
            "--enforce-eager", "--dtype", "float32", "--block-size", str(BLOCK_TOKENS),
            "--max-model-len", "4096", "--max-num-seqs", "16", "--max-num-batched-tokens", "2048",
            "--num-gpu-blocks-override", "1024", "--tensor-parallel-size", str(tp), *arguments,
        ]  # fmt: skip
        site = place / "site"
        _write_plugin(site)
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        self.group = Group(
            command,
            self.log,
            {
                "PYTHONPATH": f"{site}:{ROOT}",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                # It would compile what it computes once, in many processes.
                "TORCHDYNAMO_DISABLE": "1",
                # What it leaves there when it is killed goes with the rest.
                "TMPDIR": str(place),
                **(environment or {}),
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        self.group.end()

    def ready(self) -> Self:
        """Wait until it serves."""

        def serves() -> bool:
            assert self.group.process.poll() is None, f"it has ended:\n{self.tail()}"
            try:
                return call(self.port, "GET", "/health", timeout_s=5.0)[0] == 200
            except OSError:
                return False

        try:
            until(serves, "an engine serves", START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from error
        return self

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-6000:]

    def ask(self, prompt: list[int], tokens: int = 16, timeout_s: float = 120.0, **more: Any) -> Answer:
        """Have a prompt completed."""
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0.0,
            "ignore_eos": True, "return_token_ids": True, **more,
        }  # fmt: skip
        status, text = call(self.port, "POST", "/v1/completions", body, timeout_s)
        return Answer(status, json.loads(text))

    def metric(self, name: str) -> float:
        """The value of one of its metrics, summed up over labels."""
        text = call(self.port, "GET", "/metrics")[1]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((f"{name} ", f"{name}{{"))
        )

    def empty(self) -> bool:
        """Whether all its blocks are free."""
        return self.metric("vllm:kv_cache_usage_perc") == 0.0


def transfer(role: str, group: str, address: str, *, module: str = MODULE, name: str = CONNECTOR,
             policy: str = "fail", **extra: Any) -> dict[str, Any]:  # fmt: skip
    """What ``--kv-transfer-config`` says."""
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "coordinator": address,
            "group": group,
            "coordinator_lost_s": LOST_S,
            **extra,
        },
    }


class Pair(NamedTuple):
    """A prefill engine and a decode engine."""

    prefill: Engine
    decode: Engine

    def ask(self, prompt: list[int], transfer_id: str, tokens: int = 16) -> Answer:
        """Have a prompt completed as a proxy does it: first prefill, then decode."""
        wanted = {"do_remote_decode": True, "transfer_id": transfer_id}
        given = self.prefill.ask(prompt, 1, kv_transfer_params=wanted).params
        return self.decode.ask(prompt, tokens, kv_transfer_params=given)

    def ask_all(self, prompts: list[list[int]], name: str, at_once: int = 4) -> list[list[int]]:
        """Have all prompts completed, some at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            answers = pool.map(lambda item: self.ask(item[1], f"{name}-{item[0]}"), enumerate(prompts))
            return [answer.tokens for answer in answers]
