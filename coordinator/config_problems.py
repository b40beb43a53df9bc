"""Mistakes in a configuration, as lines that an operator can act on."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, get_args

from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import ValidationError
    from pydantic.fields import FieldInfo

Path = tuple[str | int, ...]

#: A value is quoted up to this length.
_SHOWN: Final = 60
#: A key that TOML takes without quotes.
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_NOT_A_TABLE: Final = {"model_type", "model_attributes_type"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake.

    Attributes:
        key: what the line starts with, such as ``handoff.deadline_s``.
        text: what is wrong and what is accepted.
        involved: every key that the mistake is about, as its parts: in quotes, a part may hold a dot.

    """

    key: str
    text: str
    involved: tuple[Path, ...]

    @property
    def line(self) -> str:
        """The mistake in one line, without the file's name."""
        return f"{self.key}: {self.text}"

    def touches(self, keys: set[Path]) -> bool:
        """Whether it is about one of ``keys``, about a table that holds one, or about a part of one."""
        return any(
            mine[: len(other)] == other or other[: len(mine)] == mine
            for mine in self.involved
            for other in keys
        )


def explain(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Turn all mistakes that pydantic found into problems, in the file's terms."""
    items = error.errors()
    # Of a list with a wrong entry, pydantic also says that it is too short without it.
    inside = {item["loc"][:-1] for item in items}
    return [
        _explain_one(item["type"], item["loc"], item["input"], model)
        for item in items
        if item["loc"] not in inside
    ]


def without(data: Mapping[str, object], problems: Sequence[Problem]) -> dict[str, object]:
    """Return a copy of ``data`` that lacks everything that the problems are about."""
    rest = dict(data)
    for problem in problems:
        for *tables, last in problem.involved:
            table = rest
            for name in tables:
                inner = table.get(str(name))
                if not isinstance(inner, dict):
                    break
                # Only the tables on the way are copied: what is in others may be nested deeply.
                inner = table[str(name)] = dict(inner)
                table = inner
            else:
                table.pop(str(last), None)
    return rest


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return ``; did you mean ...?`` when one of the known words is close, else nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def shown(value: object) -> str:
    """Return a value as TOML writes it, shortened."""
    if isinstance(value, (dict, list)):
        text = "a table" if isinstance(value, dict) else f"a list of {len(value)}"
    elif isinstance(value, (bool, str)):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = _number(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def dotted(location: Path) -> str:
    """Return a key as it is told: its parts with dots between them, quoted where TOML needs that."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            quoted = part if _BARE.fullmatch(part) else json.dumps(part)
            text += f".{quoted}" if text else quoted
    return text


def _number(value: object) -> str:
    try:
        return str(value)
    except ValueError:  # Python writes no number of thousands of digits, except in hexadecimal
        return f"{value:#x}"


def _explain_one(kind: str, location: Path, value: object, model: type[BaseModel]) -> Problem:
    fields, table = _walk(location, model)
    key = dotted(location)
    if kind == "extra_forbidden":
        known = list(table.model_fields)
        hint = did_you_mean(str(location[-1]), known)
        return Problem(key, f"unknown key{hint or ';'} accepted here: {', '.join(known)}", (location,))
    accepted = fields[-1].description if fields else None
    if kind in _NOT_A_TABLE or accepted is None:
        return Problem(key, f"is {shown(value)}, must be a table of keys", (location,))
    if kind == "missing":
        # The table cannot be used at all without this key.
        return Problem(key, f"is missing, must be {accepted}", (location[:-1],))
    owner = location[: len(fields)]
    if fields[-1].is_required():  # the same
        owner = owner[:-1]
    return Problem(key, f"is {shown(value)}, must be {accepted}", (owner,))


def _walk(location: Path, model: type[BaseModel]) -> tuple[list[FieldInfo], type[BaseModel]]:
    """Follow a location into the models: the fields on the way, and the last table met."""
    fields: list[FieldInfo] = []
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            break
        fields.append(field)
        inner = _model_of(field)
        if inner is None:
            break
        model = inner
    return fields, model


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
