"""Reads a request trace: JSON lines as they were published with production traces of Mooncake."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec

from coordinator.replay.errors import ReplayError

if TYPE_CHECKING:
    from pathlib import Path

#: Tokens that one id of ``hash_ids`` stands for.
BLOCK_TOKENS: Final = 512


class Prompt(NamedTuple):
    """One request of a trace.

    Attributes:
        at_s: when it came, from the first one on.
        input_tokens: length of the prompt.
        output_tokens: length of the answer.
        blocks: ids of its blocks of ``BLOCK_TOKENS`` tokens; equal ids up to a block are an equal prefix.

    """

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: tuple[int, ...] = ()


def read(path: Path, first_s: float | None = None) -> list[Prompt]:
    """Read a trace, or what came in its first ``first_s`` seconds; unpacked if the name ends in ``.gz``.

    Raises:
        ReplayError: it cannot be read, a line of it is none, times go back, or there is nothing in it.

    """
    decoder = msgspec.json.Decoder(_Line)
    prompts: list[Prompt] = []
    begin_ms = 0.0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, text in enumerate(lines, start=1):
                if not text.strip():
                    continue
                prompt = _prompt(decoder, text, f"{path}:{number}")
                begin_ms = begin_ms if prompts else prompt.at_s
                at_s = (prompt.at_s - begin_ms) / 1e3
                if prompts and at_s < prompts[-1].at_s:
                    message = f"{path}:{number}: its timestamp is before that of the line before"
                    raise ReplayError(message)
                if first_s is not None and at_s >= first_s:
                    break
                prompts.append(prompt._replace(at_s=at_s))
    except (OSError, EOFError, zlib.error) as error:
        message = f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ReplayError(message) from error
    if not prompts:
        message = f"{path}: there is no request in it"
        raise ReplayError(message)
    return prompts


def _prompt(decoder: msgspec.json.Decoder[_Line], text: bytes, where: str) -> Prompt:
    """Decode one line; ``at_s`` is still what stands there, in milliseconds."""
    try:
        line = decoder.decode(text)
    except msgspec.MsgspecError as error:
        message = f"{where}: {error}"
        raise ReplayError(message) from error
    return Prompt(line.timestamp, line.input_length, line.output_length, line.hash_ids)
