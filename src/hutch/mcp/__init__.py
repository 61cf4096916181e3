"""The tools of a box over the Model Context Protocol.

    stdio:  client ── lines of JSON ── stdio ──┐
    HTTP:   client ── the API ── http ─────────┴─ server → boxes (which box?) → hutch.tools → box

`server` knows the protocol and no transport. An `McpClient` is one caller, and the way to their
boxes: an engine in this process, a server elsewhere, or the server that received the request. This
needs the extra `mcp`, and is imported only by those who use it.
"""
