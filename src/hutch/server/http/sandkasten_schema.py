"""Sandkasten's routes, as the OpenAPI document has them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
MAX_TIMEOUT_MS = 600_000  # that may be asked for; what the operator allows is another matter
MAX_READ_BYTES = 100_000_000
_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_YES_OR_NO: Schema = {"type": "boolean"}
_BYTES: Schema = {"type": "string", "contentMediaType": "application/octet-stream"}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


def _sends(schema: Schema, kind: str = "application/json") -> Schema:
    strict = schema | {"additionalProperties": False}
    return {"required": True, "content": {kind: {"schema": strict}}}


def _answers(schema: Schema, status: str = "200", kind: str = "application/json") -> Schema:
    return {status: {"description": "Done.", "content": {kind: {"schema": schema}}}}


_OK = _object(["ok"], ok=_YES_OR_NO)
_COMMAND = _sends(
    _object(
        ["cmd"], cmd={"type": "string", "minLength": 1},
        timeout_ms={"type": "integer", "minimum": 0, "maximum": MAX_TIMEOUT_MS},
        raw_output=_YES_OR_NO, background=_YES_OR_NO,
    )
)  # fmt: skip
_DONE = _object(
    ["exit_code", "cwd", "output", "truncated", "duration_ms"],
    exit_code=_WHOLE, cwd=_TEXT, output=_TEXT, truncated=_YES_OR_NO, duration_ms=_WHOLE,
)  # fmt: skip
_FILE = _sends(
    _object(
        ["path"], path={"type": "string", "minLength": 1}, text=_TEXT,
        content_base64={"type": "string", "contentEncoding": "base64"},
    )
)  # fmt: skip
_READ = _object(
    ["path", "content_base64", "truncated"],
    path=_TEXT, content_base64=_TEXT, truncated=_YES_OR_NO,
)  # fmt: skip
_FORM = _sends(
    _object(["file"], path=_TEXT, file=_BYTES),
    "multipart/form-data",
)  # fmt: skip
_LIST = _object(
    ["entries"],
    entries={"type": "array", "items": _object(["name", "is_dir"], name=_TEXT, is_dir=_YES_OR_NO)},
)
_PATH: Schema = {"name": "path", "in": "query", "required": True, "schema": _TEXT}
_MOST: Schema = {
    "name": "max_bytes", "in": "query",
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_READ_BYTES},
}  # fmt: skip


def _files(of: str) -> dict[str, dict[str, Schema]]:
    written = _answers(_object(["ok", "paths"], ok=_YES_OR_NO,
                               paths={"type": "array", "items": _TEXT}))  # fmt: skip
    return {
        "/fs/write": {"post": {
            "operationId": f"write{of}", "summary": "Write a file.", "x-scope": "run",
            "requestBody": _FILE, "responses": _answers(_OK)}},
        "/fs/upload": {"post": {
            "operationId": f"upload{of}", "summary": "Write the files of a form.", "x-scope": "run",
            "requestBody": _FORM, "responses": written}},
        "/fs/read": {"get": {
            "operationId": f"read{of}", "summary": "Read a file.", "x-scope": "read",
            "parameters": [_PATH, _MOST], "responses": _answers(_READ)}},
    }  # fmt: skip


def sandkasten_paths() -> dict[str, dict[str, Schema]]:
    """By template and verb, without the parameters in the path."""
    process = {"$ref": "#/components/schemas/Process"}
    session: dict[str, dict[str, Schema]] = {
        "/exec": {"post": {
            "operationId": "exec", "x-scope": "run",
            "summary": "Run a command in the main shell; with `background`, start it and answer.",
            "requestBody": _COMMAND,
            "responses": _answers(_DONE) | _answers(process, "202")}},
        "/exec/stream": {"post": {
            "operationId": "execStream", "x-scope": "run",
            "summary": "The same, with its output as events while it runs.",
            "requestBody": _COMMAND, "responses": _answers(_TEXT, kind="text/event-stream")}},
        **_files("OfSession"),
    }  # fmt: skip
    listing: Schema = {
        "operationId": "listOfWorkspace", "summary": "List a folder.", "x-scope": "read",
        "parameters": [_PATH | {"required": False}], "responses": _answers(_LIST),
    }  # fmt: skip
    workspace = {**_files("OfWorkspace"), "/fs": {"get": listing}}
    return {
        **{f"/v1/sessions/{{session}}{path}": verbs for path, verbs in session.items()},
        **{f"/v1/workspaces/{{workspace}}{path}": verbs for path, verbs in workspace.items()},
    }
