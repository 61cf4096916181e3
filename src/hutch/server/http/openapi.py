"""The OpenAPI document: operations, their types and their docstrings, written out.

msgspec has the schemas of all types. Added here are the places where JSON differs from the types:
times, and the chunks of a stream.
"""

from __future__ import annotations

import inspect
import typing
from typing import Any

import msgspec

import hutch
from hutch import operations as op
from hutch import serving
from hutch.codec import form_of
from hutch.errors import BY_CODE
from hutch.types import Chunk

from .routes import SESSION_PATTERN, WORKSPACE_PATTERN, templates
from .sandkasten import MAX_READ_BYTES, MAX_TIMEOUT_MS

REF = "#/components/schemas/"
Schema = dict[str, Any]


def document() -> Schema:
    """All of it, as a value."""
    schemas = Schemas()
    paths: dict[str, Schema] = {}
    for name, cls in op.TABLE.items():
        described = _operation(name, cls, schemas)
        for template, id in templates(name, cls):
            paths.setdefault(template, {})[cls.verb.lower()] = described | {
                "operationId": id,
                "parameters": _parameters(cls, template, schemas),
            }
    for template, verbs in _sandkasten_paths().items():
        for verb, described in verbs.items():
            described["parameters"] = [*_in_path(template), *described.get("parameters", ())]
            described["responses"] |= _errors()
            paths.setdefault(template, {})[verb] = described
    paths |= _public()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Hutch",
            "version": hutch.__version__,
            "description": "Sandboxes for untrusted code, over HTTP.",
        },
        "security": [{"bearer": []}, {"key": []}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
            "schemas": dict(sorted((schemas.components | {"Error": _ERROR}).items())),
        },
    }


_ERROR: Schema = {
    "type": "object",
    "required": ["error_code", "message", "code"],
    "properties": {
        "error_code": {
            "type": "string",
            "description": "Sandkasten's word for it, or `code` in upper case.",
        },
        "message": {"type": "string", "description": "What is wrong, and what to do."},
        "code": {"type": "string", "enum": sorted(BY_CODE)},
        "details": {
            "type": "object",
            "description": "Of a command or a cell that failed: the `result` or the `execution`.",
        },
    },
    "examples": [
        {
            "error_code": "INVALID_REQUEST",
            "message": "command must be text, not 1",
            "code": "invalid_request",
        }
    ],
}
_EXAMPLES: dict[type[op.Operation[object]], Schema] = {
    op.OpenSession: {"labels": {"for": "tests"}, "ttl_seconds": 600},
    op.RunShell: {"command": "echo hello", "timeout": 30},
    op.RunCode: {"code": "6 * 7", "timeout": 30},
    op.RunProgram: {"argv": ["python3", "--version"], "timeout": 30},
}


def _operation(name: str, cls: type[op.Operation[object]], schemas: Schemas) -> Schema:
    text = inspect.getdoc(cls) or ""
    if text.startswith(f"{name}("):  # the generated docstring of a dataclass
        text = ""
    summary, _, rest = text.partition("\n\n")
    described: Schema = {
        "summary": summary or _words(name),
        **({"security": []} if cls.is_public else {"x-scope": cls.needs}),
        "responses": _answers(cls, schemas) | _errors(),
    }
    if rest:
        described["description"] = rest
    form = form_of(cls)
    if form.data:
        described["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    elif form.body:
        content = {"schema": schemas.of(form.body)}
        if cls in _EXAMPLES:
            content["example"] = _EXAMPLES[cls]
        required = any(field.required for field in msgspec.structs.fields(form.body))
        described["requestBody"] = {"required": required, "content": {"application/json": content}}
    return described


def _words(name: str) -> str:
    spaced = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name)
    return spaced.strip().capitalize() + "."


def _parameters(cls: type[op.Operation[object]], template: str, schemas: Schemas) -> list[Schema]:
    form = form_of(cls)
    in_query = []
    for name, hint in form.query.items():
        schema = schemas.of(hint)
        for choice in schema.get("anyOf", ()):  # a query has no null: the field is left out
            if choice != {"type": "null"}:
                schema = choice
        if name not in form.required and (default := form.defaults[name]) is not None:
            schema |= {"default": default}
        required = name in form.required
        in_query.append({"name": name, "in": "query", "required": required, "schema": schema})
    if template.startswith("/v1/workspaces/{workspace}/files"):
        in_query.append(_OWNER)
    return [*_in_path(template), *in_query]


_OWNER: Schema = {
    "name": "owner",
    "in": "query",
    "required": False,
    "schema": {"type": "string"},
    "description": "Whose workspace it is, with an admin key; your own if it is left out.",
}


def _in_path(template: str) -> list[Schema]:
    names = [part[1:-1] for part in template.split("/") if part.startswith("{")]
    patterns = {
        "session": {"pattern": f"^({SESSION_PATTERN})$"},
        "workspace": {"pattern": f"^{WORKSPACE_PATTERN}$"},
    }
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1, **patterns.get(name, {})},
        }
        for name in names
    ]


def _answers(cls: type[op.Operation[object]], schemas: Schemas) -> Schema:
    if cls is op.OpenSession:
        return {"201": _json("It is there.", schemas.of(cls.answer))}
    if cls is op.ReadFile:
        content: Schema = {"application/octet-stream": {}}
        return {
            "200": {"description": "The file.", "content": content},
            "206": {"description": "A range of it.", "content": content},
        }
    if cls.items is bytes:
        return {"200": {"description": "Bytes.", "content": {_KINDS[cls]: {}}}}
    if cls.streams:
        items = [item for item in typing.get_args(cls.items) or (cls.items,)]
        known = [schemas.of(item) for item in items if item is not type(None)]
        names = ", ".join(getattr(item, "__name__", "") for item in items)
        content = {"text/event-stream": {"schema": {"type": "string"}}}
        if cls.answer is not None:
            content["application/json"] = {"schema": known[-1]}
        return {"200": {"description": f"Events with one of: {names}.", "content": content}}
    if cls is serving.ListWorkspaces:
        body: Schema = {
            "type": "object",
            "required": ["workspaces"],
            "properties": {"workspaces": schemas.of(cls.answer)},
        }
        return {"200": _json("All of them.", body)}
    if cls.answer is None:
        return {"200": _json("Done.", _OK)}
    if cls.answer in (bool, int, str):
        value = {
            "type": "object",
            "required": ["value"],
            "properties": {"value": schemas.of(cls.answer)},
        }
        return {"200": _json("Done.", value)}
    if type(None) in typing.get_args(cls.answer):
        answer = next(a for a in typing.get_args(cls.answer) if a is not type(None))
        return {"200": _json("Done.", {"anyOf": [schemas.of(answer), _OK]})}
    return {"200": _json("Done.", schemas.of(cls.answer))}


_OK: Schema = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}
_KINDS: dict[type[op.Operation[object]], str] = {
    op.PackFolder: "application/x-tar",
    serving.ExportWorkspace: "application/x-tar",
    serving.ExportJournal: "application/x-asciicast",
}


def _json(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _errors() -> Schema:
    return {
        "4XX": _json("The caller can do something about it.", {"$ref": REF + "Error"}),
        "5XX": _json("The caller cannot.", {"$ref": REF + "Error"}),
    }


def _public() -> dict[str, Schema]:
    status: Schema = {"type": "object", "properties": {"status": {"type": "string"}}}
    alive = {
        "summary": "Whether it runs.",
        "security": [],
        "operationId": "healthz",
        "responses": {"200": _json("It does.", status)},
    }
    ready = {
        "summary": "Whether it takes requests.",
        "security": [],
        "operationId": "readyz",
        "responses": {
            "200": _json("It does.", status),
            "503": _json("Not yet, or no more.", status),
        },
    }
    plain_text = {"description": "For Prometheus.", "content": {"text/plain": {}}}
    metrics = {
        "summary": "Metrics for Prometheus.",
        "operationId": "metrics",
        "responses": {"200": plain_text} | _errors(),
    }
    return {"/healthz": {"get": alive}, "/readyz": {"get": ready}, "/metrics": {"get": metrics}}


class Schemas:
    """JSON schemas of types; records are named once, in `components`."""

    def __init__(self) -> None:
        self.components: dict[str, Schema] = {}

    def of(self, hint: object) -> Schema:
        (schema,), components = msgspec.json.schema_components([hint], ref_template=REF + "{name}")
        for name, component in components.items():
            if name not in self.components:
                self.components[name] = _CHUNK if name == Chunk.__name__ else _as_sent(component)
        sent: Schema = _as_sent(schema)
        return sent


def _as_sent(schema: Any, name: str = "") -> Any:
    """A schema of msgspec's, with what JSON has instead, in OpenAPI's words."""
    match schema:
        case {"type": "number"} if name.endswith("_at"):
            return {"type": "string", "format": "date-time"}
        case {"type": "integer", "minimum": _, "maximum": _, **rest}:
            return rest | {"type": "integer", "format": "int64"}
        case {"enum": _}:
            return {"type": "string"} | schema
        case {"properties": dict(properties), **rest}:
            return rest | {"properties": {n: _as_sent(item, n) for n, item in properties.items()}}
        case dict():
            return {key: _as_sent(item, name) for key, item in schema.items()}
        case list():
            return [_as_sent(item, name) for item in schema]
    return schema


_CHUNK: Schema = {
    "type": "object",
    "description": "A piece of output: `text`, or `base64` if it is not UTF-8 by itself.",
    "required": ["stream"],
    "properties": {
        "stream": {"type": "string", "enum": ["stdout", "stderr"]},
        "text": {"type": "string"},
        "base64": {"type": "string", "contentEncoding": "base64"},
    },
}


# --- Sandkasten's routes, which no operation describes ---------------------------------------

_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_YES_OR_NO: Schema = {"type": "boolean"}
_BYTES: Schema = {"type": "string", "contentMediaType": "application/octet-stream"}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


def _sends(schema: Schema, kind: str = "application/json") -> Schema:
    strict = schema | {"additionalProperties": False}
    return {"required": True, "content": {kind: {"schema": strict}}}


_COMMAND = _sends(
    _object(
        ["cmd"],
        cmd={"type": "string", "minLength": 1},
        timeout_ms={"type": "integer", "minimum": 0, "maximum": MAX_TIMEOUT_MS},
        raw_output=_YES_OR_NO,
        background=_YES_OR_NO,
    )
)
_DONE = _object(
    ["exit_code", "cwd", "output", "truncated", "duration_ms"],
    exit_code=_WHOLE,
    cwd=_TEXT,
    output=_TEXT,
    truncated=_YES_OR_NO,
    duration_ms=_WHOLE,
)
_FILE = _sends(
    _object(
        ["path"],
        path={"type": "string", "minLength": 1},
        text=_TEXT,
        content_base64={"type": "string", "contentEncoding": "base64"},
    )
)
_READ = _object(
    ["path", "content_base64", "truncated"],
    path=_TEXT,
    content_base64=_TEXT,
    truncated=_YES_OR_NO,
)
_FORM = _sends(
    _object(["file"], path=_TEXT, file=_BYTES),
    "multipart/form-data",
)
_UPLOADED = _object(["ok", "paths"], ok=_YES_OR_NO, paths={"type": "array", "items": _TEXT})
_LIST = _object(
    ["entries"],
    entries={"type": "array", "items": _object(["name", "is_dir"], name=_TEXT, is_dir=_YES_OR_NO)},
)
_PATH: Schema = {"name": "path", "in": "query", "required": True, "schema": _TEXT}
_MOST: Schema = {
    "name": "max_bytes",
    "in": "query",
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_READ_BYTES},
}


def _files(of: str) -> dict[str, dict[str, Schema]]:
    return {
        "/fs/write": {
            "post": {
                "operationId": f"write{of}",
                "summary": "Write a file.",
                "x-scope": "run",
                "requestBody": _FILE,
                "responses": {"200": _json("Done.", _OK)},
            }
        },
        "/fs/upload": {
            "post": {
                "operationId": f"upload{of}",
                "summary": "Write the files of a form.",
                "x-scope": "run",
                "requestBody": _FORM,
                "responses": {"200": _json("Done.", _UPLOADED)},
            }
        },
        "/fs/read": {
            "get": {
                "operationId": f"read{of}",
                "summary": "Read a file.",
                "x-scope": "read",
                "parameters": [_PATH, _MOST],
                "responses": {"200": _json("Done.", _READ)},
            }
        },
    }


def _sandkasten_paths() -> dict[str, dict[str, Schema]]:
    """By template and verb, without the parameters in the path."""
    process = {"$ref": REF + "Process"}
    events = {"text/event-stream": {"schema": _TEXT}}
    session: dict[str, dict[str, Schema]] = {
        "/exec": {
            "post": {
                "operationId": "exec",
                "x-scope": "run",
                "summary": "Run a command in the main shell; with `background`, start it and "
                "answer.",
                "requestBody": _COMMAND,
                "responses": {"200": _json("Done.", _DONE), "202": _json("Done.", process)},
            }
        },
        "/exec/stream": {
            "post": {
                "operationId": "execStream",
                "x-scope": "run",
                "summary": "The same, with its output as events while it runs.",
                "requestBody": _COMMAND,
                "responses": {"200": {"description": "Done.", "content": events}},
            }
        },
        **_files("OfSession"),
    }
    listing: Schema = {
        "operationId": "listOfWorkspace",
        "summary": "List a folder.",
        "x-scope": "read",
        "parameters": [_PATH | {"required": False}],
        "responses": {"200": _json("Done.", _LIST)},
    }
    workspace = {**_files("OfWorkspace"), "/fs": {"get": listing}}
    return {
        **{f"/v1/sessions/{{session}}{path}": verbs for path, verbs in session.items()},
        **{f"/v1/workspaces/{{workspace}}{path}": verbs for path, verbs in workspace.items()},
    }
