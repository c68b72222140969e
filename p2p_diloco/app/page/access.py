"""Rules of who may see and change what, and bounds on what a visitor can make a page spend."""

from __future__ import annotations

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

REQUESTS_AT_ONCE, REQUESTS_A_SECOND = 60.0, 5.0
"""Requests that one address may make at once, and for long."""
MOST_ADDRESSES = 10_000
MOST_BODY_BYTES = 16 * 1024
HEADERS = {
    b"content-security-policy": b"default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    b"img-src data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",
    b"cache-control": b"no-store",
}


class Access:
    """Middleware that refuses what a page must not answer.

    In private mode, a Host that is not this machine's is refused, so that a site elsewhere cannot read the page through
    a name that it points here. In both modes, another Origin is refused.

    Args:
        app: the page.
        hosts: the hosts with their port that are answered, in lower case; empty: all, for a public page.
        now: seconds of a steady clock.
    """

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str], now: Callable[[], float] = time.monotonic) -> None:
        self._app, self._hosts = app, hosts
        self._budgets = Budgets(now)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = HTTPConnection(scope)
        refusal = self._refusal(visit)

        async def with_headers(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                given = message["headers"]
                assert isinstance(given, list)
                message = {**message, "headers": [*given, *HEADERS.items()]}
            await send(message)

        if refusal is not None:
            await PlainTextResponse(refusal[1] + "\n", refusal[0])(scope, receive, with_headers)  # type: ignore[arg-type]
            return
        await self._app(scope, receive, with_headers)  # type: ignore[arg-type]

    def _refusal(self, visit: HTTPConnection) -> tuple[int, str] | None:
        host, origin = visit.headers.get("host", "").lower(), visit.headers.get("origin")
        if self._hosts and host not in self._hosts:
            return 403, "this page answers only to the address that p2p-diloco printed"
        if origin is not None and origin.lower().partition("://")[2] != host:
            return 403, "this request comes from another site"
        address = visit.client.host if visit.client is not None else ""
        if not self._hosts and not self._budgets.takes(address):
            return 429, "too many requests from this address; try again in a minute"
        return None


class Budgets:
    """A budget of requests for each address; of very many addresses, those seen last.

    Args:
        now: seconds of a steady clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def takes(self, address: str) -> bool:
        """Return whether one more request of `address` is within its budget, and count it."""
        now = self._now()
        left, at = self._left.pop(address, (REQUESTS_AT_ONCE, now))
        left = min(REQUESTS_AT_ONCE, left + (now - at) * REQUESTS_A_SECOND)
        self._left[address] = max(left - 1.0, 0.0), now
        if len(self._left) > MOST_ADDRESSES:
            self._left.popitem(last=False)
        return left >= 1.0


class Token:
    """The secret of a private page: who opened the printed address has it in a cookie.

    Args:
        secret: 32 hexadecimal digits.
        port: the page's port; browsers share the cookies of all ports of a host.
    """

    def __init__(self, secret: str, port: int) -> None:
        self._secret = secret
        self.cookie = f"p2p_diloco_{port}"

    def is_held_by(self, visit: HTTPConnection) -> bool:
        """Return whether a visitor may change things."""
        try:
            cookies = SimpleCookie(visit.headers.get("cookie", ""))
        except CookieError:
            return False
        held = cookies.get(self.cookie)
        return held is not None and self.fits(held.value)

    def fits(self, word: str) -> bool:
        """Return whether `word` is the secret, in a time that does not depend on how much of it is right."""
        return hmac.compare_digest(word.encode(), self._secret.encode())
