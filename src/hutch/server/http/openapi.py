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

from .request import Header, Request
from .routes import SESSION, WORKSPACE, templates
from .sandkasten import sandkasten_paths

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
    for template, verbs in sandkasten_paths().items():
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
        "error_code": {"type": "string", "description": "As Sandkasten has it, where it does."},
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
    return [*_in_path(template), *in_query]


def _in_path(template: str) -> list[Schema]:
    names = [part[1:-1] for part in template.split("/") if part.startswith("{")]
    patterns = {
        "session": {"pattern": f"^({SESSION})$"},
        "workspace": {"pattern": f"^{WORKSPACE}$"},
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
        "summary": "Metrics for a monitor.",
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


# --- a page that shows the document; it loads nothing from elsewhere ------------------------

_POLICY: list[Header] = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; connect-src 'self'; "
        b"style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
]

_PAGE = b"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Hutch</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  overflow-wrap: anywhere }
h2 { margin: 3rem 0 0 } h3 { font-size: 1rem; margin: 2rem 0 0 }
h3, code { font-family: ui-monospace, monospace; font-size: .95em }
h3 b { display: inline-block; min-width: 4.5em }
p { margin: .2rem 0 } ul { margin: .2rem 0; padding-left: 1.2rem }
nav a { display: inline-block; margin-right: 1rem }
.scope, .more { opacity: .7; font-size: .9rem }
</style>
<h1>Hutch</h1>
<p>The same as a document for programs: <a href="/openapi.json">openapi.json</a>.
Keys are sent as <code>Authorization: Bearer KEY</code>.</p>
<nav id="index"></nav>
<main id="operations">Loading\xe2\x80\xa6</main>
<script src="/docs.js"></script>
</html>
"""

_SCRIPT = b"""'use strict';
const add = (parent, tag, text, name) => {
  const made = parent.appendChild(document.createElement(tag));
  if (text) made.textContent = text;
  if (name) made.className = name;
  return made;
};
const say = (parent, tag, text, name) => {  // what stands between backticks is code
  const made = add(parent, tag, '', name);
  text.split('`').forEach((part, n) => n % 2 ? add(made, 'code', part) : made.append(part));
  return made;
};
const link = (parent, id, text) => { add(parent, 'a', text).href = '#' + id; };
const between = (parent, word, items, each) =>
  items.forEach((item, n) => { if (n) parent.append(word); each(item); });
const type = (parent, schema) => {
  const also = schema.anyOf || schema.oneOf;
  if (schema.$ref) {
    const name = schema.$ref.split('/').pop();
    link(parent, name, name);
  } else if (also) between(parent, ' or ', also, each => type(parent, each));
  else if ('const' in schema) add(parent, 'code', JSON.stringify(schema.const));
  else if (schema.enum)
    between(parent, ' or ', schema.enum, each => add(parent, 'code', JSON.stringify(each)));
  else if (schema.type === 'array') {
    parent.append('list of ');
    type(parent, schema.items || {});
  } else if (schema.type === 'object' && schema.additionalProperties) {
    parent.append('object of ');
    type(parent, schema.additionalProperties);
  } else parent.append([].concat(schema.type || 'anything').join(' or '));
};
const field = (list, name, schema, required, more) => {
  const item = add(list, 'li');
  add(item, 'code', name);
  item.append(': ');
  type(item, schema);
  if (required) item.append(', required');
  if (schema.default !== undefined && schema.default !== null) {
    item.append(', without it ');
    add(item, 'code', JSON.stringify(schema.default));
  }
  if (more) item.append(', ' + more);
  if (schema.description) say(item, 'span', ' ' + schema.description, 'more');
};
const fields = (parent, schema) => {
  if (!schema.properties) return type(add(parent, 'p'), schema);
  const list = add(parent, 'ul');
  for (const [name, each] of Object.entries(schema.properties))
    field(list, name, each, (schema.required || []).includes(name));
};
const content = (parent, what, held) => {
  for (const [kind, {schema}] of Object.entries(held || {})) {
    const line = add(parent, 'p', what + ', ' + kind);
    if (schema && schema.properties) fields(parent, schema);
    else if (schema) { line.append(': '); type(line, schema); }
  }
};
const show = (main, path, verb, said) => {
  const head = add(main, 'h3');
  add(head, 'b', verb.toUpperCase());
  head.append(path);
  if (said.summary) say(main, 'p', said.summary);
  if (said.description) say(main, 'p', said.description);
  if (said['x-scope']) add(main, 'p', 'needs a key that may ' + said['x-scope'], 'scope');
  if ((said.parameters || []).length) {
    const list = add(main, 'ul');
    for (const each of said.parameters)
      field(list, each.name, each.schema || {}, each.required, 'in the ' + each.in);
  }
  if (said.requestBody) content(main, 'body', said.requestBody.content);
  for (const [status, answer] of Object.entries(said.responses || {}))
    if (status < '4') content(main, 'answer ' + status, answer.content);
};
const group = path => {
  const parts = path.split('/').filter(part => part && part !== 'v1');
  return /^{/.test(parts[1] || '') && parts[2] ? parts[0] + ' / ' + parts[2] : parts[0] || '/';
};
fetch('/openapi.json').then(answer => answer.json()).then(all => {
  const main = document.getElementById('operations');
  const index = document.getElementById('index');
  main.textContent = '';
  const groups = new Map();
  const into = (name, operation) => groups.set(name, [...(groups.get(name) || []), operation]);
  for (const [path, verbs] of Object.entries(all.paths))
    for (const [verb, said] of Object.entries(verbs)) into(group(path), [path, verb, said]);
  for (const [name, each] of [...groups])  // one alone is no group
    if (each.length === 1 && name.includes(' / ')) {
      groups.delete(name);
      into(name.split(' / ')[0], each[0]);
    }
  const begin = name => {
    const id = 'group-' + name.replace(/[^a-z]+/g, '-');
    add(main, 'h2', name).id = id;
    link(index, id, name);
  };
  for (const [name, each] of [...groups].sort()) {
    begin(name);
    for (const operation of each) show(main, ...operation);
  }
  begin('records');
  for (const [name, schema] of Object.entries(all.components.schemas)) {
    add(main, 'h3', name).id = name;
    if (schema.description) say(main, 'p', schema.description);
    fields(main, schema);
  }
  if (location.hash) location.replace(location.hash);
});
"""


async def page(request: Request) -> None:
    await request.answer(200, _PAGE, _POLICY, b"text/html; charset=utf-8")


async def script(request: Request) -> None:
    await request.answer(200, _SCRIPT, _POLICY, b"text/javascript; charset=utf-8")


async def home(request: Request) -> None:
    await request.answer(307, b"", [(b"location", b"/docs")], b"text/plain")
