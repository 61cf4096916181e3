"""The Python SDK. `_async` is the source; `_sync` is generated from it by scripts/unasync."""
