"""Checks a value against a JSON schema: as much of it as ours use, and anything else is refused."""

from __future__ import annotations

from typing import Any, Final

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_KNOWN: Final = {
    "$ref", "additionalProperties", "anyOf", "default", "description", "enum", "items", "properties",
    "required", "title", "type",
}  # fmt: skip


def mistakes(
    value: object, schema: dict[str, Any], components: dict[str, Any], where: str = "$"
) -> list[str]:
    """Return what of ``value`` is not as the schema says."""
    assert set(schema) <= _KNOWN, f"{where}: this checker does not know {set(schema) - _KNOWN}"
    if "$ref" in schema:
        return mistakes(value, components[schema["$ref"].rpartition("/")[2]], components, where)
    if "anyOf" in schema:
        tried = [mistakes(value, option, components, where) for option in schema["anyOf"]]
        return [] if any(not found for found in tried) else min(tried, key=len)
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    kind = schema.get("type")
    if kind is not None and (
        not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")
    ):
        return [f"{where}: {value!r} is no {kind}"]
    found = []
    if isinstance(value, dict):
        found += _object(value, schema, components, where)
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            found += mistakes(item, schema["items"], components, f"{where}[{number}]")
    return found


def _object(
    value: dict[str, object], schema: dict[str, Any], components: dict[str, Any], where: str
) -> list[str]:
    properties = schema.get("properties", {})
    found = [f"{where}: {name} is missing" for name in schema.get("required", []) if name not in value]
    rest = schema.get("additionalProperties", not properties)
    for name, inner in value.items():
        if name in properties:
            found += mistakes(inner, properties[name], components, f"{where}.{name}")
        elif isinstance(rest, dict):
            found += mistakes(inner, rest, components, f"{where}.{name}")
        elif not rest:
            found.append(f"{where}: {name} is not described")
    return found
