"""Tokens: what rank 0 tells all ranks beside how far to drain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.client.inbox import Head
from coordinator.client.token import Token
from coordinator.errors import ProtocolError

heads = st.builds(Head, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))


@given(heads, st.sampled_from([{"lost": True}, {"quiet": True}]), st.integers(0, 63))
def test_flagged_tokens_come_back_as_they_went(head: Head, flag: dict[str, bool], life: int) -> None:
    token = Token(head, **flag, life=life)
    assert len(token.pack()) == 17
    assert Token.unpack(token.pack()) == token


@given(heads, st.integers(0, 1000))
def test_without_a_flag_it_is_the_inbox_s(head: Head, life: int) -> None:
    assert Token(head, life=life).pack() == head.pack()
    assert Token.unpack(head.pack()) == Token(head)


def test_lives_are_told_apart() -> None:
    tokens = {Token(Head(5, 7), lost=True, life=life).pack() for life in range(64)}
    assert len(tokens) == 64
    assert Token(Head(5, 7), lost=True, life=64).pack() in tokens


@pytest.mark.parametrize("flags", [3, 4, 7, 255])
def test_unknown_flags_are_refused(flags: int) -> None:
    with pytest.raises(ProtocolError, match="does not know"):
        Token.unpack(Head(5, 7).pack()[:-1] + bytes([flags]))


@pytest.mark.parametrize("length", [0, 1, 16, 18])
def test_other_bytes_are_no_token(length: int) -> None:
    with pytest.raises(ProtocolError, match="has 17 bytes"):
        Token.unpack(bytes(length))
