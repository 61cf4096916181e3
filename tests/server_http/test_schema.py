"""The document of the API: what it says is so, and nothing that it allows breaks the server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import schemathesis
from http_of_tests import KEY, Running
from hypothesis import HealthCheck, settings

from hutch.server.http.openapi import document

ROOT = Path(__file__).parents[2]
DOCUMENT = document()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
# The server is a thread of this process, and hypothesis does not control what it draws at random.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


def test_the_document_in_the_tree_is_the_one_that_is_served(server: Running) -> None:
    subprocess.run([sys.executable, ROOT / "scripts/openapi", "--check"], check=True, timeout=60)
    assert server.ask("GET", "/openapi.json").json == json.loads(json.dumps(DOCUMENT))


@pytest.fixture(scope="module")
def patient(server: Running) -> Running:
    server.target = server.session()  # type: ignore[attr-defined]
    return server


@SCHEMA.parametrize()
@settings(
    max_examples=6, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much,
                           HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_nothing_that_it_allows_breaks_the_server(
    case: schemathesis.Case, patient: Running
) -> None:
    path, verb = case.operation.path, case.method.upper()
    if path in SLOW:
        pytest.skip("it answers when something else happens")
    if "session" in (case.path_parameters or {}) and (path, verb) != CLOSING:
        case.path_parameters["session"] = patient.target  # type: ignore[attr-defined]
    if (path, verb) == OPENING and isinstance(case.body, dict):
        for name in ("packages", "preload"):  # they would be downloaded
            case.body.pop(name, None)
    if isinstance(case.body, dict):
        for name in ("timeout", "timeout_ms"):
            if name in case.body:
                case.body[name] = 1
    response = case.call(
        base_url=f"http://127.0.0.1:{patient.port}", timeout=60,
        headers={"Authorization": f"Bearer {KEY}"},
    )  # fmt: skip
    if response.status_code >= 500:
        assert response.json()["code"] in EXPECTED, (case, response.text)
    if response.status_code == 201:
        patient.ask("DELETE", f"/v1/sessions/{response.json()['id']}")
    if response.status_code >= 400 and response.content:
        assert {"error_code", "message", "code"} <= response.json().keys()


# What a request that is right can be told by a machine that is full, or a clock that ran out.
EXPECTED = {"timed_out", "no_space", "no_capacity", "backend_unavailable"}
OPENING, CLOSING = ("/v1/sessions", "POST"), ("/v1/sessions/{session}", "DELETE")
# Streams that go on until they are left, and what has a life of its own.
SLOW = {
    "/v1/sessions/{session}/files/watch",
    "/v1/workspaces/{workspace}/files/watch",
    "/v1/sessions/{session}/journal/follow",
    "/v1/audit/follow",
    "/v1/sessions/follow",
    "/v1/logs/follow",
    "/v1/images",
}
