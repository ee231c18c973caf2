"""The description of the endpoints at `/openapi.json`, generated from the declared fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import msgspec

from outrider_core.chat.api.errors import ErrorBody
from outrider_core.chat.api.fields import Fields

#: statuses of refusals and failures, whose bodies have OpenAI's form
STATUSES = (400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 502, 503)

#: a server-sent event; its data is JSON or [DONE]
EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def description(calls: Mapping[str, type[Fields]], gets: Iterable[str], models: Iterable[str]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of an endpoint.

    Args:
        calls: The requests that are posted, by path.
        gets: Paths that are read.
        models: Names that a request may give its model.
    """
    kinds = [*calls.values(), ErrorBody]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in calls.values():
        components[kind.__name__]["properties"]["model"] = {"type": "string", "enum": list(models)}
    refused = {str(status): _answer("refused or failed", "#/components/schemas/ErrorBody") for status in STATUSES}
    paths: dict[str, Any] = {path: {"get": {"responses": {"200": _answer("answered"), **refused}}} for path in gets}
    for path, kind in calls.items():
        whole = _answer("the answer, whole or as server-sent events")
        whole["content"]["text/event-stream"] = {"schema": EVENT}
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        body = {"required": True, "content": content}
        paths[path] = {"post": {"requestBody": body, "responses": {"200": whole, **refused}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": version("outrider")},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _answer(text: str, schema: str = "") -> dict[str, Any]:
    form = {"$ref": schema} if schema else {"type": "object"}
    return {"description": text, "content": {"application/json": {"schema": form}}}
