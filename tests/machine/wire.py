"""Hypothesis strategies for whatever msgspec can decode, made from the types and their bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from msgspec import inspect

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

#: msgpack knows integers from here on, up to there.
LOWEST, HIGHEST = -(2**63), 2**64 - 1
#: Lists and strings longer than this show nothing new.
LONG = 5


def values(annotation: object) -> SearchStrategy[Any]:
    """Values that keep every bound of ``annotation``."""
    return _values(inspect.type_info(annotation))


def _values(info: inspect.Type) -> SearchStrategy[Any]:  # noqa: C901, PLR0911, PLR0912 - one case per kind of type
    match info:
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            low = LOWEST if info.ge is None else info.ge
            high = HIGHEST if info.le is None else info.le
            return st.integers(
                low if info.gt is None else max(low, info.gt + 1),
                high if info.lt is None else min(high, info.lt - 1),
            )
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.StrType(pattern=None):
            return st.text(min_size=info.min_length or 0, max_size=_length(info.max_length))
        case inspect.StrType():
            assert info.pattern is not None
            return st.from_regex(info.pattern).filter(
                lambda text: len(text) <= (info.max_length or len(text))
            )
        case inspect.BytesType():
            return st.binary(
                min_size=info.min_length or 0, max_size=_length(info.max_length, info.min_length)
            )
        case inspect.ListType():
            return st.lists(_values(info.item_type), max_size=_length(info.max_length))
        case inspect.DictType():
            return st.dictionaries(_values(info.key_type), _values(info.value_type), max_size=LONG)
        case inspect.AnyType():
            return st.one_of(st.none(), st.booleans(), st.integers(LOWEST, HIGHEST), st.text(max_size=LONG))
        case inspect.VarTupleType():
            return st.lists(_values(info.item_type), max_size=_length(info.max_length)).map(tuple)
        case inspect.LiteralType():
            return st.sampled_from(info.values)
        case inspect.EnumType():
            return st.sampled_from(list(info.cls))
        case inspect.UnionType():
            return st.one_of(*(_values(member) for member in info.types))
        case inspect.StructType():
            return st.builds(info.cls, **{field.name: _values(field.type) for field in info.fields})
        case inspect.Metadata():
            return _values(info.type)
        case _:
            message = f"no strategy for {info}"
            raise NotImplementedError(message)


def _length(most: int | None, least: int | None = 0) -> int:
    return min(LONG + (least or 0), LONG + 64 if most is None else most)
