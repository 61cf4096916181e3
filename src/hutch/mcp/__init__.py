"""The tools of a box over the Model Context Protocol, for whichever client speaks it.

    stdio:  client ── lines of JSON ── stdio ──┐
    HTTP:   client ── the API ── http ───────────┴─ server → boxes (which box?) → hutch.tools → box

`server` knows the protocol and no transport. A `McpClient` says who asks, and by which way their
boxes are reached: an engine in this process, a server elsewhere, or the very server that was
asked. Needs the extra `mcp`, and is loaded by nobody who does not ask for it.
"""
