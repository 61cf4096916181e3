"""Checks of Host and Origin: from a browser, only pages of this server may send requests.

An attacker's name can be made to resolve to this machine (DNS rebinding), so the Host header must
have one of our names; and pages of other origins are refused, with or without a key. Both are
checked before anything else.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from .request import HTTPError, Request

LOOPBACK = frozenset(("127.0.0.1", "localhost", "[::1]"))
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::([0-9]{1,5}))?")


class Origins:
    def __init__(self, hosts: Iterable[str] = ()) -> None:
        """`hosts`: names of this server, without a port, beside those of the loopback."""
        self._hosts = LOOPBACK | {host.lower().rstrip(".") for host in hosts}

    def check(self, request: Request) -> None:
        """Raises HTTPError unless host and origin are allowed."""
        if request.doubled is not None:
            raise HTTPError(400, f"there are two {request.doubled.decode()} headers")
        host = request.headers.get(b"host", b"").decode("latin-1")
        found = _HOST.fullmatch(host)
        if not found:
            raise HTTPError(400, "the Host header must name this server")
        if not request.is_local and not self._is_ours(found[1].lower(), request):
            raise HTTPError(
                421, f"this server is not called {host}: see `allowed_hosts` in its config"
            )
        self._check_browser(request, host)

    def _is_ours(self, name: str, request: Request) -> bool:
        if name.rstrip(".") in self._hosts:
            return True
        # An address is no name that anybody could point elsewhere.
        server = request.scope.get("server")
        try:
            return bool(server) and ipaddress.ip_address(name.strip("[]")) == ipaddress.ip_address(
                server[0]
            )
        except ValueError:
            return False

    def _check_browser(self, request: Request, host: str) -> None:
        origin = request.headers.get(b"origin")
        if origin is not None:
            text = origin.decode("latin-1")
            # Where a proxy speaks HTTPS for us, we cannot know which of the two it was.
            schemes = (
                ("https",) if request.scope["scheme"] in ("https", "wss") else ("http", "https")
            )
            if text not in [f"{scheme}://{host}" for scheme in schemes]:
                raise HTTPError(403, "pages of other servers may not use this one", code=_CODE)
        site = request.headers.get(b"sec-fetch-site", b"none")
        if site not in (b"none", b"same-origin"):
            raise HTTPError(403, "pages of other servers may not use this one", code=_CODE)
        if (
            request.scope["type"] == "websocket"
            and origin is None
            and b"sec-fetch-mode" in request.headers
        ):
            raise HTTPError(403, "a browser says where it comes from (Origin)", code=_CODE)


_CODE = "not_permitted"
