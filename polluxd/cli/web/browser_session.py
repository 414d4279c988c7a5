"""Who may read the live page: the one browser that showed the token which `polluxctl web` printed.

The loopback address is open to every user of the machine, and to every page that the user's browser shows.
"""

from __future__ import annotations

import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class BrowserSession:
    """A token that works once, and the cookie that it is exchanged for.

    The pages lie below `folder`, a random path. Browsers send a cookie to every port of a host: the path of the cookie
    keeps it from other users' servers on this machine. Such a server can set cookies for every port: none of them has
    the random name of this one.
    """

    def __init__(self) -> None:
        self.folder = f"/{secrets.token_urlsafe(12)}"
        self.token = secrets.token_urlsafe(24)
        self._unused = self.token
        self._name, self._cookie = f"pollux-{secrets.token_hex(8)}", secrets.token_urlsafe(24)

    def protect(self, app: ASGIApp) -> ASGIApp:
        """Return `app` for this browser alone."""

        async def protected(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_with_headers(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message).update(_HEADERS)
                await send(message)

            found = self._answer(Request(scope)) or app
            await found(scope, receive, send_with_headers)

        return protected

    def _answer(self, request: Request) -> Response | None:
        """Return an answer to whoever is not in yet; None: let the request pass."""
        if request.method != "GET":
            return PlainTextResponse("this page is read only: expected GET\n", 405, {"Allow": "GET"})
        token = request.query_params.get("token")
        if token is not None and self._unused and _equal(token, self._unused):
            self._unused = ""
            # Not a redirection: where another site's page has the link, a browser would send no strict cookie along.
            answer = HTMLResponse(
                f'<!doctype html><meta http-equiv="refresh" content="0;url={self.folder}/"><title>polluxd</title>'
            )
            answer.set_cookie(self._name, self._cookie, path=self.folder, httponly=True, samesite="strict")
            return answer
        if _equal(request.cookies.get(self._name, ""), self._cookie):
            return None
        return PlainTextResponse(
            "this page belongs to the browser that opened the URL of `polluxctl web` first. The URL works once: "
            "run `polluxctl web` again\n",
            403,
        )


def _equal(given: str, secret: str) -> bool:
    return secrets.compare_digest(given.encode(), secret.encode())
