"""A page that shows the OpenAPI document. All of it is here: it loads nothing from elsewhere."""

from __future__ import annotations

from .request import Header, Request

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
