"""What HTTP would change on its way is refused before: it makes a text of anything."""

from __future__ import annotations

from hutch import codec
from hutch.errors import InvalidRequest
from hutch.operations import Operation


def check(operation: Operation[object]) -> None:
    """InvalidRequest if a field is not what it should be, as the engine would say."""
    form = codec.form_of(type(operation))
    texts = [name for name in form.body if form.hints[name] in (str, str | None)]
    for name in (*form.parameters, *form.query, *texts):
        form.readers[name](getattr(operation, name), name)
    if form.data and getattr(operation, form.data) is None:
        raise InvalidRequest("data must be bytes or give bytes, not NoneType")
