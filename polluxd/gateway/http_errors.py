"""Refusals, as the gateway answers them."""

from __future__ import annotations

from .records import Refusal


class HttpRefusal(Exception):
    """A request gets an error in place of an answer.

    Args:
        status: of HTTP; 401 and 409 are final for an agent, 503 says to try again, 422 and 429 refuse this message.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def token_refused(why: str) -> HttpRefusal:
    return HttpRefusal(401, "token-refused", why)


def unavailable(why: str) -> HttpRefusal:
    return HttpRefusal(503, "unavailable", why)


def not_sensible(why: str) -> HttpRefusal:
    return HttpRefusal(422, "refused", why)


def too_often(why: str) -> HttpRefusal:
    return HttpRefusal(429, "too-often", why)


def of_attempt(refusal: Refusal) -> HttpRefusal:
    """Return the answer to an attempt that the database refuses."""
    match refusal:
        case "over":
            return HttpRefusal(409, "attempt-over", "the job has ended, or a later attempt of it runs")
        case "unknown":
            return HttpRefusal(
                503, "not-known-yet", "polluxd has not seen this attempt of the job run yet: try again"
            )
        case "too-often":
            return too_often("this attempt sends too much: at most 120 reports a minute and 20 fingerprints")
        case "too-much":
            return too_often(
                "your jobs have reported much today (UTC): until tomorrow each reports once in 5 minutes"
            )
        case "too-long":
            return not_sensible(
                "expected a report that takes at most 2,048 bytes in the database: shorten its texts"
            )
