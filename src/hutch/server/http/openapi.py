"""The OpenAPI document: operations, their fields and their docstrings, written out."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from enum import Enum
from typing import Any, Literal

import hutch
from hutch import operations as op
from hutch import serving
from hutch.codec import default_of, fields_of, form_of, plain
from hutch.types import Chunk, Piece

from .routes import SESSION, WORKSPACE, templates
from .sandkasten_schema import sandkasten_paths

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
                "operationId": id, "parameters": _parameters(cls, template, schemas),
            }  # fmt: skip
    for template, verbs in sandkasten_paths().items():
        for verb, described in verbs.items():
            described["parameters"] = [
                *_in_path(template), *described.get("parameters", ()),
            ]  # fmt: skip
            described["responses"] |= _errors()
            paths.setdefault(template, {})[verb] = described
    paths |= _public()
    schemas.found["Error"] = _ERROR
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Hutch", "version": hutch.__version__,
            "description": "Boxes for programs that nobody has read, over HTTP.",
        },
        "security": [{"bearer": []}, {"key": []}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
            "schemas": dict(sorted(schemas.found.items())),
        },
    }  # fmt: skip


_ERROR: Schema = {
    "type": "object",
    "required": ["error_code", "message", "code"],
    "properties": {
        "error_code": {"type": "string", "description": "As Sandkasten has it, where it does."},
        "message": {"type": "string", "description": "What is wrong, and what to do."},
        "code": {"type": "string"},
        "details": {"type": "object"},
    },
}


def _operation(name: str, cls: type[op.Operation[object]], schemas: Schemas) -> Schema:
    text = inspect.getdoc(cls) or ""
    if text.startswith(f"{name}("):  # a dataclass without words of its own
        text = ""
    summary, _, rest = text.partition("\n\n")
    described: Schema = {
        "summary": summary or _words(name),
        "x-scope": cls.needs,
        "responses": _answers(cls, schemas) | _errors(),
    }
    if rest:
        described["description"] = rest
    form = form_of(cls)
    if form.data:
        described["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    elif form.body:
        properties = {n: _with_default(schemas.of(form.hints[n], n), form.defaults[n])
                      for n in form.body}  # fmt: skip
        required = [n for n in form.body if n in form.required]
        schema: Schema = {
            "type": "object", "properties": properties, "additionalProperties": False,
        }  # fmt: skip
        if required:
            schema["required"] = required
        described["requestBody"] = {
            "required": bool(required), "content": {"application/json": {"schema": schema}},
        }  # fmt: skip
    return described


def _words(name: str) -> str:
    spaced = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name)
    return spaced.strip().capitalize() + "."


def _with_default(schema: Schema, default: Any) -> Schema:
    if default is MISSING or default is None:
        return schema
    return schema | {"default": plain(default, "")}


def _parameters(cls: type[op.Operation[object]], template: str, schemas: Schemas) -> list[Schema]:
    form = form_of(cls)
    in_query = [
        {
            "name": name, "in": "query", "required": name in form.required,
            "schema": _with_default(_without_null(schemas.of(form.hints[name], name)),
                                    form.defaults[name]),
        }
        for name in form.query
    ]  # fmt: skip
    return [*_in_path(template), *in_query]


def _in_path(template: str) -> list[Schema]:
    names = [part[1:-1] for part in template.split("/") if part.startswith("{")]
    patterns = {"session": {"pattern": f"^({SESSION})$"},
                "workspace": {"pattern": f"^{WORKSPACE}$"}}  # fmt: skip
    return [
        {
            "name": name, "in": "path", "required": True,
            "schema": {"type": "string", "minLength": 1, **patterns.get(name, {})},
        }
        for name in names
    ]  # fmt: skip


def _without_null(schema: Schema) -> Schema:
    if isinstance(schema.get("type"), list):
        return schema | {"type": schema["type"][0]}
    return schema


def _answers(cls: type[op.Operation[object]], schemas: Schemas) -> Schema:
    if cls is op.OpenSession:
        return {"201": _json("It is there.", schemas.of(cls.answer))}
    if cls is op.ReadFile:
        content: Schema = {"application/octet-stream": {}}
        return {"200": {"description": "The file.", "content": content},
                "206": {"description": "A range of it.", "content": content}}  # fmt: skip
    if cls.items is bytes:
        return {"200": {"description": "Bytes.", "content": {_KINDS[cls]: {}}}}
    if cls.streams:
        items = [item for item in typing.get_args(cls.items) or (cls.items,)]
        known = [schemas.of(item) for item in items if item is not type(None)]
        said = f"Events with one of: {', '.join(getattr(item, '__name__', '') for item in items)}."
        content = {"text/event-stream": {"schema": {"type": "string"}}}
        if cls.answer is not None:
            content["application/json"] = {"schema": known[-1]}
        return {"200": {"description": said, "content": content}}
    if cls is serving.ListWorkspaces:
        body: Schema = {"type": "object", "required": ["workspaces"],
                        "properties": {"workspaces": schemas.of(cls.answer)}}  # fmt: skip
        return {"200": _json("All of them.", body)}
    if cls.answer is None:
        return {"200": _json("Done.", _OK)}
    if cls.answer in (bool, int, str):
        value = {"type": "object", "required": ["value"],
                 "properties": {"value": schemas.of(cls.answer)}}  # fmt: skip
        return {"200": _json("Done.", value)}
    if type(None) in typing.get_args(cls.answer):
        found = next(a for a in typing.get_args(cls.answer) if a is not type(None))
        return {"200": _json("Done.", {"anyOf": [schemas.of(found), _OK]})}
    return {"200": _json("Done.", schemas.of(cls.answer))}


_OK: Schema = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}
_KINDS: dict[type[op.Operation[object]], str] = {
    op.PackFolder: "application/x-tar",
    serving.ExportWorkspace: "application/x-tar",
    serving.ExportJournal: "application/x-asciicast",
}


def _json(said: str, schema: Schema) -> Schema:
    return {"description": said, "content": {"application/json": {"schema": schema}}}


def _errors() -> Schema:
    return {"4XX": _json("The caller can do something about it.", {"$ref": REF + "Error"}),
            "5XX": _json("The caller cannot.", {"$ref": REF + "Error"})}  # fmt: skip


def _public() -> dict[str, Schema]:
    status: Schema = {"type": "object", "properties": {"status": {"type": "string"}}}
    alive = {"summary": "Whether it runs.", "security": [], "operationId": "healthz",
             "responses": {"200": _json("It does.", status)}}  # fmt: skip
    ready = {"summary": "Whether it takes requests.", "security": [], "operationId": "readyz",
             "responses": {"200": _json("It does.", status),
                           "503": _json("Not yet, or no more.", status)}}  # fmt: skip
    plain_text = {"description": "For Prometheus.", "content": {"text/plain": {}}}
    metrics = {"summary": "Metrics for a monitor.", "operationId": "metrics",
               "responses": {"200": plain_text} | _errors()}  # fmt: skip
    return {"/healthz": {"get": alive}, "/readyz": {"get": ready}, "/metrics": {"get": metrics}}


class Schemas:
    """JSON schemas of types; records are named once, in `found`."""

    def __init__(self) -> None:
        self.found: dict[str, Schema] = {}

    def of(self, hint: Any, name: str = "") -> Schema:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._union(arguments, name)
        if hint is float and name.endswith("_at"):
            return {"type": "string", "format": "date-time"}
        if hint in _SIMPLE:
            return dict(_SIMPLE[hint])
        if origin is Literal:
            return {"type": "string", "enum": list(arguments)}
        if isinstance(hint, type) and issubclass(hint, Enum):
            return {"type": "string", "enum": [member.value for member in hint]}
        if origin is tuple and arguments[-1] is not Ellipsis:
            return {"type": "array", "prefixItems": [self.of(a) for a in arguments],
                    "minItems": len(arguments), "maxItems": len(arguments)}  # fmt: skip
        if origin in (tuple, list):
            return {"type": "array", "items": self.of(arguments[0])}
        if origin in (dict, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if is_dataclass(hint):
            return self._record(typing.cast(type, hint))
        raise TypeError(f"{name}: no schema for {hint}")

    def _union(self, arguments: tuple[Any, ...], name: str) -> Schema:
        carried = [a for a in arguments if a in _SIMPLE or not _is_stream(a)]
        schemas = [self.of(a, name) for a in carried if a is not type(None)]
        if type(None) not in carried:
            return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        only = schemas[0]
        if len(schemas) == 1 and isinstance(only.get("type"), str) and "enum" not in only:
            return only | {"type": [only["type"], "null"]}
        return {"anyOf": [*schemas, {"type": "null"}]}

    def _record(self, cls: type) -> Schema:
        if cls.__name__ not in self.found:
            self.found[cls.__name__] = {}  # it may name itself
            self.found[cls.__name__] = self._described(cls)
        return {"$ref": REF + cls.__name__}

    def _described(self, cls: type) -> Schema:
        if cls is Chunk:
            return _CHUNK
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in fields_of(cls)}
        strict = cls.__name__ in ("Limits", "Mount")  # what callers send
        schema: Schema = {
            "type": "object",
            "properties": {
                n: _with_default(self.of(hints[n], n), default_of(f)) if strict
                else self.of(hints[n], n) for n, f in fields.items()
            },
        }  # fmt: skip
        text = inspect.getdoc(cls) or ""
        if text and not text.startswith(f"{cls.__name__}("):
            schema["description"] = text.partition("\n\n")[0]
        required = [n for n, f in fields.items() if default_of(f) is MISSING]
        if required:
            schema["required"] = required
        if strict:
            schema["additionalProperties"] = False
        if cls is Piece:
            schema["description"] = "Part of an output; `data` is base64."
        return schema


def _is_stream(hint: Any) -> bool:
    return "Iterable" in str(typing.get_origin(hint))


_SIMPLE: dict[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    bytes: {"type": "string", "contentEncoding": "base64"},
    Any: {},
    object: {},
    type(None): {"type": "null"},
}
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
