"""The gateway's messages as an OpenAPI document."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from polluxd.gateway.app import ENDPOINTS, MessagePath
from polluxd.gateway.payloads import AttemptCredential, ErrorAnswer, UserCredential

ERRORS = {
    401: "The gateway does not know the token (any more), or it is of another kind: ask for a new one by munge, once.",
    403: "The credential is of another user's job, or for another cluster.",
    404: "What a user asked for is not known, or is another user's.",
    409: "`attempt-over`: the job has ended, or a later attempt runs. `superseded`: a newer question waits.",
    422: "The message makes no sense; its first faulty member is named.",
    429: "Too often.",
    503: "The database does not answer, or polluxd has not seen the job yet: try again.",
}
"""What each status of a refusal means."""
_REFS = "#/components/schemas/{model}"


def document(version: str) -> dict[str, Any]:
    """Return the OpenAPI document."""
    models: dict[type[BaseModel], None] = dict.fromkeys((AttemptCredential, UserCredential, ErrorAnswer))
    for endpoint in ENDPOINTS:
        if endpoint.method == "POST":
            models[endpoint.reads] = None
        if endpoint.answers is not None:
            models[endpoint.answers] = None
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REFS)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace(":int", "")
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "polluxd gateway", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: MessagePath) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "integer", "minimum": 1}}
        for name in re.findall(r"\{(\w+):int\}", endpoint.path)
    ]
    operation: dict[str, Any] = {"summary": summary(endpoint)}
    if endpoint.method == "GET":
        schema = endpoint.reads.model_json_schema()
        parameters += [
            {"name": name, "in": "query", "required": False, "schema": kind}
            for name, kind in schema.get("properties", {}).items()
        ]
    else:
        operation["requestBody"] = {"required": True, "content": _json(endpoint.reads)}
    if parameters:
        operation["parameters"] = parameters
    if endpoint.answers is not None:
        operation["responses"] = {"200": {"description": "The answer.", "content": _json(endpoint.answers)}}
    elif endpoint.method == "POST":
        operation["responses"] = {"204": {"description": "Taken in."}}
    else:
        content: dict[str, Any] = {"application/json": {"schema": {}}}
        operation["responses"] = {
            "200": {"description": "What `polluxctl --json` prints.", "content": content}
        }
    operation["responses"]["default"] = {"description": "A refusal.", "content": _json(ErrorAnswer)}
    if endpoint.rights != "anybody":
        operation["security"] = [{"token": []}]
    return operation


def summary(endpoint: MessagePath) -> str:
    """Return the first sentence of what a request does."""
    return (endpoint.serve.__doc__ or "").strip().splitlines()[0]


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFS.format(model=model.__name__)}}}
