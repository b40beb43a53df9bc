# ruff: noqa: INP001 - scripts/ holds programs and is no package
"""The demo of the connector: two real engines on CPU, a coordinator between them, and what heals.

``scripts/vllm-demo`` calls it in the environment that ``scripts/vllm-env`` makes. It stands on what the
tests of the connector stand on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from tests.vllm.prompts import prompt
from tests.vllm.rig import ROOT, Coordinator, Engine, Group, call, free_port, transfer, until

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWER_TOKENS: Final = 16
AT_A_TIME: Final = 4
LONGEST: Final = 2000
#: How long requests may run before decode is killed.
HEAD_START_S: Final = 0.3
#: How long prefill holds the blocks of a request that decode never asks for.
DEADLINE_S: Final = 10.0

console = Console(highlight=False)


class Demo:
    """Everything that runs."""

    def __init__(self, place: Path, tp: int, stack: ExitStack) -> None:
        self.place, self.tp, self.stack = place, tp, stack
        self.model = place / "model"
        self.rows: list[tuple[str, str, str]] = []

    def say(self, text: str) -> None:
        """Tell what happens."""
        console.print(text)

    def engine(self, role: str = "", address: str = "") -> Engine:
        """Start an engine; one without a role is alone."""
        group = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(role, "")
        configuration = transfer(role, group, address) if role else None
        engine = Engine(sys.executable, self.model, self.place, tp=self.tp, transfer=configuration)
        self.stack.callback(engine.close)
        return engine

    def expected(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """What a single engine answers."""
        began_s = time.monotonic()
        single = self.engine().ready()
        self.say(f"A single engine is ready after {time.monotonic() - began_s:.0f} s; it answers first.")
        answers = [single.ask(prompt, ANSWER_TOKENS).tokens for prompt in prompts]
        single.close()
        return answers


def ask(port: int, prompts: Sequence[list[int]]) -> list[list[int] | str]:
    """Ask the proxy, some at a time; returns tokens, or why there are none."""

    def one(prompt: list[int]) -> list[int] | str:
        body: dict[str, Any] = {
            "model": "tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0.0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        try:
            status, text = call(port, "POST", "/v1/completions", body)
        except OSError as error:
            return f"no answer: {error}"
        if status != 200:  # noqa: PLR2004 - HTTP's own number
            return f"HTTP {status}: {text[:120]}"
        tokens: list[int] = json.loads(text)["choices"][0]["token_ids"]
        return tokens

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(one, prompts))


def run(demo: Demo, count: int) -> bool:
    """Run it; returns whether all was as it should be."""
    demo.say(f"Making a tiny model with random weights, and {count} prompts of up to {LONGEST} tokens.")
    program = ROOT / "scripts" / "vllm_model.py"
    subprocess.run([sys.executable, str(program), str(demo.model)], check=True)  # noqa: S603 - our own program
    prompts = [prompt(seed, max(1, LONGEST * seed // max(1, count - 1))) for seed in range(count)]
    expected = demo.expected(prompts)
    coordinator = demo.stack.enter_context(Coordinator(demo.place, deadline_s=DEADLINE_S))
    began_s = time.monotonic()
    prefill = demo.engine("kv_producer", coordinator.address)
    decode = demo.engine("kv_consumer", coordinator.address)
    prefill.ready()
    decode.ready()
    demo.say(
        f"Prefill and decode, {demo.tp} rank(s) each, are ready after {time.monotonic() - began_s:.0f} s."
    )
    proxy = start_proxy(demo, prefill, decode)
    answers = ask(proxy, prompts)
    same = sum(answer == tokens for answer, tokens in zip(answers, expected, strict=True))
    demo.rows.append(
        ("same tokens as a single engine", f"{same} of {count}", "prefilled here, decoded there")
    )
    good = same == count

    demo.say("Decode is killed now (SIGKILL), in the middle of what it does.")
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(ask, proxy, prompts)
        time.sleep(HEAD_START_S)
        decode.group.signal(signal.SIGKILL)
        killed_s = time.monotonic()
        lost = [answer for answer in answering.result() if isinstance(answer, str)]
    demo.rows.append(("failed with decode", str(len(lost)), lost[0] if lost else ""))
    until(prefill.empty, "prefill's blocks are free")
    free_s = time.monotonic() - killed_s
    demo.rows.append(("all blocks of prefill are free", f"after {free_s:.1f} s", "nothing is stuck"))
    decode.close()
    decode = demo.engine("kv_consumer", coordinator.address).ready()
    proxy = start_proxy(demo, prefill, decode)
    answers = ask(proxy, prompts)
    same = sum(answer == tokens for answer, tokens in zip(answers, expected, strict=True))
    demo.rows.append(("same tokens, with a new decode", f"{same} of {count}", "prefill was not restarted"))
    status = coordinator.get("/v1/status")
    demo.rows.append(("in flight at the end", str(len(coordinator.get("/v1/handoffs")["handoffs"])), ""))
    demo.say(f"The coordinator: {json.dumps(status)[:200]}")
    return good and same == count


def start_proxy(demo: Demo, prefill: Engine, decode: Engine) -> int:
    """Start a proxy in front of two engines; returns its port."""
    port = free_port()
    command = [sys.executable, "-m", "coordinator.integrations.vllm.proxy", "--port", str(port)]
    for role, engine in (("--prefill", prefill), ("--decode", decode)):
        command += [role, f"http://127.0.0.1:{engine.port}"]
    group = Group(command, demo.place / "proxy.log", {"PYTHONPATH": str(ROOT)})
    demo.stack.callback(group.end)

    def listens() -> bool:
        try:
            call(port, "GET", "/")
        except OSError:
            return False
        return True

    until(listens, "the proxy listens")
    return port


def main() -> None:
    """Run it, and show the table."""
    parser = argparse.ArgumentParser(
        description="Two real vLLM engines on CPU, and a coordinator between them."
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each engine")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="kvd-"))
    with ExitStack() as stack:
        demo = Demo(place, given.tp, stack)
        good = run(demo, given.prompts)
    table = Table(title=f"two vLLM engines, TP {given.tp}, NIXL")
    for column in ("", "value", "remark"):
        table.add_column(column)
    for row in demo.rows:
        table.add_row(*row)
    console.print(table)
    if given.keep:
        demo.say(f"The logs are in {place}")
    else:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
