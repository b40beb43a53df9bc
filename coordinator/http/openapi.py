"""Describes the paths of ``routes.TABLE`` in OpenAPI 3.1; the answers' schemas come from their types."""

from __future__ import annotations

from types import UnionType
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec

import coordinator
from coordinator.http import answers
from coordinator.http.routes import JSON, TABLE

if TYPE_CHECKING:
    from coordinator.http.routes import Route

_REF: Final = "#/components/schemas/{name}"
_ROOM: Final = {
    "name": "room",
    "in": "path",
    "required": True,
    "description": "The request's id, an unsigned 64-bit number.",
    "schema": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
}


def describe() -> dict[str, Any]:
    """Return the document."""
    types: list[Any] = [answers.Problem]
    for route in TABLE:
        types += [*_alternatives(route), *([route.body] if route.body is not None else [])]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(map(str, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in TABLE:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kv-coordinator",
            "version": coordinator.__version__,
            "description": "What operators see of a coordinator, and can do to it. Durations are seconds.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    problem = schema_of[str(answers.Problem)]
    kinds = [schema_of[str(kind)] for kind in _alternatives(route)] or [{"type": "string"}]
    answer = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    responses = {"200": _response("Done.", route.content, answer)}
    statuses = dict(route.statuses)
    statuses[400] = "a parameter or the body cannot be used"
    statuses[403] = "the request comes from where it must not come from"
    statuses[415] = "the body is compressed"
    if route.changes:
        statuses[401] = "the token is missing or wrong"
    for status, why in sorted(statuses.items()):
        schema = answer if status in route.also_answers else problem
        responses[str(status)] = _response(why, JSON, schema)
    operation: dict[str, Any] = {
        "operationId": route.handler,
        "summary": route.summary,
        "parameters": _parameters(route),
        "responses": responses,
    }
    if route.changes:
        operation["security"] = [{}, {"token": []}]
    if route.body is not None:
        operation["requestBody"] = {
            "required": False,
            "content": {JSON: {"schema": schema_of[str(route.body)]}},
        }
    return operation


def _alternatives(route: Route) -> tuple[Any, ...]:
    """Return the types of which a route answers one."""
    if route.answer is None:
        return ()
    return get_args(route.answer) if isinstance(route.answer, UnionType) else (route.answer,)


def _parameters(route: Route) -> list[dict[str, Any]]:
    found = [_ROOM] if "{room}" in route.path else []
    for name, parameter in route.query.items():
        default = {} if parameter.default is None else {"default": parameter.default}
        found.append(
            {
                "name": name,
                "in": "query",
                "description": parameter.accepted,
                "schema": {**parameter.schema, **default},
            }
        )
    return found


def _response(description: str, content: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {content: {"schema": schema}}}
