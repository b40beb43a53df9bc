"""Addresses are taken apart, and told to peers as they can use them."""

from __future__ import annotations

import pytest

from coordinator.addresses import Address, advertised, split


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ipc:///run/x", Address("ipc", path="/run/x")),
        ("tcp://127.0.0.1:7700", Address("tcp", host="127.0.0.1", port=7700)),
        ("tcp://[::1]:0", Address("tcp", host="[::1]", port=0)),
        ("tcp://node-7.rack_2:65535", Address("tcp", host="node-7.rack_2", port=65535)),
        ("tcp://*:1", Address("tcp", host="*", port=1)),
    ],
)
def test_an_address_is_taken_apart(text: str, address: Address) -> None:
    assert split(text) == address


@pytest.mark.parametrize(
    "text", ["", "tcp:/x:1", "udp://a:1", "tcp://a b:1", "tcp://a:-1", "tcp://a:1\n", "ipc:///a\0b"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        split(text)


@pytest.mark.parametrize(
    ("endpoint", "host", "told"),
    [
        ("tcp://0.0.0.0:7700", "node7", "tcp://node7:7700"),
        ("tcp://[::]:7700", "2001:db8::7", "tcp://[2001:db8::7]:7700"),
        ("tcp://10.0.0.1:7700", "node7", "tcp://10.0.0.1:7700"),
        ("ipc:///run/x", "node7", "ipc:///run/x"),
        ("tcp://0.0.0.0:7700", "", "tcp://0.0.0.0:7700"),
    ],
)
def test_peers_are_told_an_address_that_they_can_connect_to(endpoint: str, host: str, told: str) -> None:
    """Case C33: one advertised endpoint."""
    assert advertised(endpoint, host) == told


def test_a_host_that_only_looks_local_is_not() -> None:
    assert not split("tcp://127.example:1").local
    assert not split("tcp://0.0.0.0:1").local
