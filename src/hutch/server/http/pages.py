"""Pages for browsers: the dashboard, built from `packages/dashboard`, and /docs.

What a box wrote is shown by the dashboard, so its policy allows no script but its own. HTML that a
box wrote goes into `/frame`: there it may run, without an origin, a network, or a way out.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hutch.errors import NotFound

from .request import Act, Header, Request

STATIC = Path(__file__).parents[2] / "dashboard" / "static"
FOREVER = b"public, max-age=31536000, immutable"  # a changed file has another name
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_HTML = b"text/html; charset=utf-8"
_KINDS = {
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".png": b"image/png",
    ".ico": b"image/x-icon",
    ".woff2": b"font/woff2",
}
_EVERYWHERE: list[Header] = [
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-dns-prefetch-control", b"off"),
    (
        b"permissions-policy",
        b"accelerometer=(), camera=(), display-capture=(), geolocation=(), "
        b"gyroscope=(), hid=(), magnetometer=(), microphone=(), midi=(), payment=(), "
        b"publickey-credentials-get=(), serial=(), usb=()",
    ),
]


NOT_BUILT = (
    "was not built when Hutch was installed: open the server's address without a ticket, which "
    "says how to get it"
)


def is_built(folder: Path = STATIC) -> bool:
    """Whether there is a dashboard in this installation of Hutch."""
    return (folder / "index.html").is_file()


class DashboardPages:
    """`folder`: where the built files are. Switched off, `/` leads to /docs."""

    def __init__(self, folder: Path = STATIC, *, is_enabled: bool = True) -> None:
        self._folder, self._is_enabled = folder, is_enabled

    def __repr__(self) -> str:
        return f"<DashboardPages in {self._folder}{'' if self._is_enabled else ', switched off'}>"

    def routes(self) -> Iterator[tuple[str, Act]]:
        """(template, handler) of each page. All are public: the key is asked for by the page."""
        if not self._is_enabled:
            yield "/", _to_docs
            return
        yield "/", self._index
        yield "/frame", _frame
        yield "/assets/{name}", self._asset

    async def _index(self, request: Request) -> None:
        page = _content(self._folder / "index.html") or _NOT_BUILT
        nonce = secrets.token_urlsafe(16).encode()
        # Editors and terminals make their styles as they go, and read it there.
        told = b'<meta name="style-nonce" content="%s">' % nonce
        if not request.service.is_open:
            told += b'<meta name="needs-key" content="yes">'  # so the page need not try without
        page = page.replace(b"<head>", b"<head>" + told, 1)
        page = page.replace(b"<style>", b'<style nonce="%s">' % nonce)
        headers = _index_headers(nonce, request.headers.get(b"host", b""))
        await request.answer(200, page, headers, _HTML)

    async def _asset(self, request: Request) -> None:
        name = request.parameters["name"]
        kind = _KINDS.get(os.path.splitext(name)[1])
        # A name without slashes, which does not begin with a dot, is in the folder or nowhere.
        if kind is None or not _NAME.fullmatch(name):
            raise NotFound("there is no such file")
        file = _read(self._folder / "assets" / name, request)
        if file is None:
            raise NotFound("there is no such file: if Hutch was upgraded, reload the page")
        headers = [
            *_EVERYWHERE,
            (b"cache-control", FOREVER),
            (b"vary", b"Accept-Encoding"),
            # An SVG, or a script, that is opened by itself may do nothing.
            (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; sandbox"),
        ]
        if file.is_packed:
            headers.append((b"content-encoding", b"gzip"))
        await request.answer(200, file.content, headers, kind)


class _File(NamedTuple):
    content: bytes
    is_packed: bool


def _read(path: Path, request: Request) -> _File | None:
    """The file, as its `.gz` if the client takes that and there is one."""
    if _takes_gzip(request.headers.get(b"accept-encoding", b"")):
        packed = _content(path.with_name(path.name + ".gz"))
        if packed is not None:
            return _File(packed, True)
    content = _content(path)
    return None if content is None else _File(content, False)


def _content(path: Path) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            return file.read()
    except OSError:
        return None


def _takes_gzip(accepted: bytes) -> bool:
    for each in accepted.decode("latin-1").lower().split(","):
        name, _, weight = each.partition(";")
        if name.strip() in ("gzip", "*"):
            return re.fullmatch(r"\s*q=0(\.0*)?\s*", weight) is None
    return False


def _index_headers(nonce: bytes, host: bytes) -> list[Header]:
    # Not every browser takes 'self' for WebSockets. The host was checked: it has no odd characters.
    policy = (
        b"default-src 'none'; script-src 'self'; style-src 'self' 'nonce-" + nonce + b"'; "
        b"img-src 'self' data: blob:; font-src 'self'; "
        b"connect-src 'self' ws://" + host + b" wss://" + host + b"; "
        b"frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        b"require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return [
        *_EVERYWHERE,
        (b"content-security-policy", policy),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"x-frame-options", b"DENY"),
        # A stored copy would have a used nonce; without one, going back asks for a new page.
        (b"cache-control", b"no-store"),
    ]


_NOT_BUILT = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Hutch: no dashboard</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 40em; margin: 4em auto; padding: 0 1em; }
code { font: 14px/1.5 ui-monospace, monospace; }
</style>
</head>
<main>
<h1>This server runs, without its dashboard</h1>
<p>The dashboard was not built when Hutch was installed, because Node.js 20.19 or newer with npm, or
the network, was not there. Everything else works: <a href="/docs">the API</a>, the command line
and the SDKs.</p>
<p>To get the dashboard, either install a wheel from a release, which has it inside; or install
Node.js 20.19 or newer, and then install Hutch again from its sources:</p>
<p><code>pip install --force-reinstall --no-deps .</code></p>
<p>Then restart the server, and reload this page. Hutch itself never needs Node.js.</p>
</main>
</html>
"""


# --- the frame for HTML that a box wrote -----------------------------------------------------

# The page that embeds it sends {html, theme} once, and gets {height} whenever that changes. The
# sandbox makes the frame's origin opaque, wherever it is opened, so it has no access to the page,
# to storage or to the API. It cannot load, connect or submit; it could only navigate itself, which
# `frame-src` of the embedding page does not allow.
_FRAME_POLICY = (
    b"sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; "
    b"style-src 'unsafe-inline'; img-src data: blob:; font-src data:; media-src data: blob:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
_FRAME = b"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Output of a cell</title>
<script>
'use strict';
addEventListener('message', event => {
  if (event.source !== parent || typeof event.data?.html !== 'string') return;
  const dark = event.data.theme === 'dark';
  const tell = parent.postMessage.bind(parent);
  // No browser has a policy against these.
  for (const name of ['RTCPeerConnection', 'webkitRTCPeerConnection', 'WebTransport'])
    delete globalThis[name];
  document.open();
  document.write('<!doctype html><meta charset="utf-8"><style>:root{color-scheme:' +
    (dark ? 'dark' : 'light') + '}body{margin:0;overflow-x:auto;font:14px/1.5 system-ui,' +
    'sans-serif;color:' + (dark ? '#e6e6e6' : '#1a1a1a') + '}</style>' + event.data.html);
  document.close();
  const root = document.documentElement;
  const say = () => tell({ height: Math.ceil(root.getBoundingClientRect().height) }, '*');
  new ResizeObserver(say).observe(root);
  say();
}, { once: true });
parent.postMessage({ height: 0 }, '*');
</script>
</html>
"""


async def _frame(request: Request) -> None:
    headers = [
        *_EVERYWHERE,
        (b"content-security-policy", _FRAME_POLICY),
        (b"cache-control", b"no-cache"),
    ]
    await request.answer(200, _FRAME, headers, _HTML)


# --- /docs shows the OpenAPI document, and loads nothing from elsewhere ----------------------

_DOCS_HEADERS: list[Header] = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; connect-src 'self'; "
        b"style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
]

_DOCS_PAGE = b"""<!doctype html>
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

_DOCS_SCRIPT = b"""'use strict';
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


async def docs_page(request: Request) -> None:
    await request.answer(200, _DOCS_PAGE, _DOCS_HEADERS, _HTML)


async def docs_script(request: Request) -> None:
    await request.answer(200, _DOCS_SCRIPT, _DOCS_HEADERS, _KINDS[".js"])


async def _to_docs(request: Request) -> None:
    await request.answer(307, b"", [(b"location", b"/docs")], b"text/plain")
