"""Reads what stands in a query or a body, and refuses what does not belong there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from coordinator.errors import CoordinatorError
from coordinator.events import State
from coordinator.http.views import MAX_PAGE, PAGE, read_place
from coordinator.log_stream import MAX_RECENT
from coordinator.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

MAX_ROOM: Final = 2**64 - 1
LEVELS: Final = ("debug", "info", "warning", "error")


class BadRequestError(CoordinatorError):
    """Something in a request cannot be used; the text says what, and what is accepted."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a query.

    Attributes:
        read: turns its text into a value, or raises ValueError.
        accepted: completes "must be ...".
        schema: the same for OpenAPI.
        default: its value when it is left out.

    """

    read: Callable[[str], Any]
    accepted: str
    schema: dict[str, object]
    default: object = None


def whole(least: int, most: int, default: int | None = None) -> Parameter:
    """Return a parameter that is a whole number in a range."""

    def read(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else -1
        if not least <= value <= most:
            raise ValueError
        return value

    schema: dict[str, object] = {"type": "integer", "minimum": least, "maximum": most}
    return Parameter(read, f"a whole number from {least} to {most}", schema, default)


def one_of(values: tuple[str, ...], default: str | None = None) -> Parameter:
    """Return a parameter that is one of a few words."""

    def read(text: str) -> str:
        if text not in values:
            raise ValueError
        return text

    return Parameter(read, f"one of {', '.join(values)}", {"type": "string", "enum": list(values)}, default)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


STATE: Final = one_of(tuple(state.value for state in State))
REASON: Final = one_of(tuple(reason.value for reason in Reason))
GROUP: Final = Parameter(str, "the name of a group", {"type": "string"})
OLDER_S: Final = Parameter(_seconds, "a number of seconds, at least 0", {"type": "number", "minimum": 0})
AFTER: Final = Parameter(read_place, "what stood in next", {"type": "string"})
LIMIT: Final = whole(1, MAX_PAGE, PAGE)
LEVEL: Final = one_of(LEVELS, "info")
ROOM: Final = whole(0, MAX_ROOM)
COUNT: Final = whole(0, MAX_RECENT, 100)
BACKLOG: Final = whole(0, MAX_RECENT, 0)


def query(request: web.Request, parameters: dict[str, Parameter]) -> dict[str, Any]:
    """Read a query.

    Raises:
        BadRequestError: a parameter is unknown, or its value cannot be used.

    """
    unknown = sorted(set(request.query) - set(parameters))
    if unknown:
        known = ", ".join(parameters) or "none"
        message = f"unknown parameter {unknown[0]!r}; accepted here: {known}"
        raise BadRequestError(message)
    values = {}
    for name, parameter in parameters.items():
        text = request.query.get(name)
        try:
            values[name] = parameter.default if text is None else parameter.read(text)
        except ValueError as error:
            message = f"{name} is {text!r}, must be {parameter.accepted}"
            raise BadRequestError(message) from error
    return values


def room(request: web.Request) -> int:
    """Read the room in the path.

    Raises:
        BadRequestError: it is none.

    """
    text = request.match_info["room"]
    try:
        return int(ROOM.read(text))
    except ValueError as error:
        message = f"room is {text!r}, must be {ROOM.accepted}"
        raise BadRequestError(message) from error
