"""What a worker is told on its standard input is checked, down to the last character."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.errors import ConfigError
from coordinator.messages import Pool
from coordinator.worker.settings import (
    WorkerSettings,
    decode_settings,
    encode_settings,
    is_pool_path,
    new_pool_path,
)
from tests.worker.support import LAYOUT

SETTINGS = WorkerSettings(
    control="ipc:///run/x",
    token="0f" * 16,
    label="p-0",
    backend="loopback",
    options={},
    pool=Pool(new_pool_path(), LAYOUT.pool_bytes(4, 1), 4),
    layout=LAYOUT,
    world_size=1,
    rank=0,
    heartbeat_s=1.0,
)


def test_what_was_written_is_read() -> None:
    assert decode_settings(encode_settings(SETTINGS)) == SETTINGS


@pytest.mark.parametrize(
    "changes", [{"token": "0f" * 16 + "\n"}, {"token": "0F" * 16}, {"label": "p-0\n"}, {"heartbeat_s": 0.0}]
)
def test_what_is_not_exactly_so_is_refused(changes: dict[str, object]) -> None:
    line = encode_settings(msgspec.structs.replace(SETTINGS, **changes))
    with pytest.raises(ConfigError, match="worker settings: "):
        decode_settings(line)


def test_a_pool_has_a_name_of_its_own_kind() -> None:
    path = new_pool_path()
    assert is_pool_path(path)
    assert not is_pool_path(path + "\n")
    assert not is_pool_path(f"/elsewhere{path}")
