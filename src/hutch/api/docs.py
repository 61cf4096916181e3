"""A page that shows the OpenAPI document. All of it is here: it loads nothing from elsewhere."""

from __future__ import annotations

from .ask import Ask, Header

_POLICY: list[Header] = [
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; connect-src 'self'; "
     b"style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
]  # fmt: skip

_PAGE = b"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Hutch</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { font-size: 1rem; margin: 2rem 0 0; font-family: ui-monospace, monospace }
h2 b { display: inline-block; min-width: 4.5em }
p { margin: .2rem 0 } pre { background: #8881; padding: .6rem; overflow: auto; font-size: .85rem }
.scope { opacity: .6; font-size: .85rem }
</style>
<h1>Hutch</h1>
<p>The same as a document for programs: <a href="/openapi.json">openapi.json</a>.
Keys are sent as <code>Authorization: Bearer KEY</code>.</p>
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
const show = (main, path, verb, said) => {
  const head = add(main, 'h2');
  add(head, 'b', verb.toUpperCase());
  head.append(path);
  add(main, 'p', said.summary);
  if (said.description) add(main, 'p', said.description);
  if (said['x-scope']) add(main, 'p', 'needs a key that may ' + said['x-scope'], 'scope');
  const query = (said.parameters || []).filter(p => p.in === 'query').map(p => p.name);
  if (query.length) add(main, 'p', 'query: ' + query.join(', '));
  const json = said.requestBody && said.requestBody.content['application/json'];
  if (json) add(main, 'pre', JSON.stringify(json.schema, null, 1));
};
fetch('/openapi.json').then(answer => answer.json()).then(all => {
  const main = document.getElementById('operations');
  main.textContent = '';
  for (const [path, verbs] of Object.entries(all.paths))
    for (const [verb, said] of Object.entries(verbs)) show(main, path, verb, said);
});
"""


async def page(ask: Ask) -> None:
    await ask.answer(200, _PAGE, _POLICY, b"text/html; charset=utf-8")


async def script(ask: Ask) -> None:
    await ask.answer(200, _SCRIPT, _POLICY, b"text/javascript; charset=utf-8")
