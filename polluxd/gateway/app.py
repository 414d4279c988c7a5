"""The paths of the gateway.

Each has one model of what it reads and one of what it answers; `docs/openapi.py` makes the reference of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from polluxd.errors import PolluxError, StoreError

from . import http_errors, payloads
from .budgets import Pace, Turns
from .http_errors import HttpRefusal
from .order_watch import OrderWatch
from .payloads import (
    Accepted,
    Acknowledgement,
    ErrorAnswer,
    ErrorDetail,
    HealthAnswer,
    HistoryQuestion,
    JobsQuestion,
    OrdersAnswer,
    OrdersQuestion,
    PriorAnswer,
    Question,
    ReportMessage,
    TokenAnswer,
    TokenRequest,
    TrainingMessage,
)
from .records import Holder, Records, SentReport
from .report_batches import ReportBatches
from .tokens import Decoder, Tokens
from .visitors import Visitor

log = logging.getLogger(__name__)

ANSWER_S = 60.0
"""Longest time from a whole request to its answer."""
LONGEST_QUERY = 256
"""Bytes after the question mark of a URL."""
QUESTION_S = 2.0
"""Longest statement of a user's question."""
QUESTIONS = 6
"""Users whose questions are answered at a time."""


class Questions(Protocol):
    """What `polluxctl` of ordinary users asks.

    Each raises PolluxError with words for the user.
    """

    def jobs(self, uid: int, *, ended: bool) -> Any: ...

    def top(self, uid: int) -> Any: ...

    def cluster(self, uid: int) -> Any: ...

    def explain(self, uid: int, job: int) -> Any: ...

    def history(self, uid: int, job: int, since: float) -> Any: ...


@dataclass(frozen=True)
class Call:
    """One request that was read, checked and authorised."""

    holder: Holder
    token: str
    message: Any
    connection: Visitor
    job: int
    """Of the path; 0: none."""


Rights = Literal["anybody", "attempt", "user"]


@dataclass(frozen=True)
class MessagePath:
    """One path, with its models."""

    method: Literal["GET", "POST"]
    path: str
    rights: Rights
    reads: type[BaseModel]
    answers: type[BaseModel] | None
    """None: nothing, or a document of polluxctl."""
    serve: Callable[[GatewayService, Call], Awaitable[Any]]
    longest: int = payloads.LONGEST


T = TypeVar("T")


class GatewayService:
    """Answers agents and users.

    Args:
        cluster: ClusterName of slurm.conf.
        interval_s: time between two reports of an agent [s].
    """

    def __init__(
        self,
        records: Records,
        questions: Questions,
        munge: Decoder,
        *,
        cluster: str,
        version: str,
        interval_s: float = 30.0,
    ) -> None:
        self.records = records
        self.questions = questions
        self.version = version
        self._statements = ThreadPoolExecutor(3, thread_name_prefix="pollux-statement")
        # One of each user at a time, so that nobody's question waits behind another user's.
        self._asking = ThreadPoolExecutor(QUESTIONS, thread_name_prefix="pollux-question")
        self._looks = ThreadPoolExecutor(1, thread_name_prefix="pollux-orders")
        self.tokens = Tokens(records, munge, cluster, self._statements, interval_s=interval_s)
        self.watch = OrderWatch(records, self._looks)
        self.inbox = ReportBatches(records, self._statements)
        self.reports_of_user = Turns(32, 2048)
        self._turns = Turns(4, 512)
        self._questions_of_user = Turns(1, 3)
        self._requests = Pace(200, 2000, 15.0)
        """Of one user: 600 jobs may report and acknowledge at once."""
        self._strangers = Pace(100, 50, 15.0)
        """Requests without a token that was seen before, by name of the client."""
        self._faults = Pace(1 / 60, 1)

    def app(self) -> ASGIApp:
        """Return the ASGI application."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                endpoint, job = _asked(scope)
                if endpoint is None:
                    response = await self._no_path(scope["state"]["connection"])
                else:
                    response = await self.answer(endpoint, Request(scope, receive), job)
                await response(scope, receive, send)
            except Exception as error:
                self._say(error)
                scope["state"]["connection"].hang_up()

        return guarded

    async def answer(self, endpoint: MessagePath, request: Request, job: str | None) -> Response:
        """Return the answer, or a refusal; `job`: as the path has it."""
        connection: Visitor = request.scope["state"]["connection"]
        try:
            async with asyncio.timeout(ANSWER_S):
                document = await self._serve(endpoint, request, job)
        except HttpRefusal as refusal:
            return _refusal(refusal)
        except StoreError as error:
            log.debug("the database refused or was away", exc_info=error)
            return _refusal(http_errors.unavailable("the database does not answer: try again"))
        except PolluxError as error:
            return _refusal(HttpRefusal(404, "no-answer", str(error)))
        except TimeoutError:
            return _refusal(http_errors.unavailable(f"no answer within {ANSWER_S:g} s: try again"))
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            self._say(error)
            return _refusal(HttpRefusal(500, "fault", "a fault in polluxd: its log says where"))
        finally:
            connection.checked = False
        if document is None:
            return Response(status_code=204)
        content = document.model_dump_json().encode() if isinstance(document, BaseModel) else document
        connection.make_room(len(content))
        return _json(content)

    def _say(self, error: Exception) -> None:
        """Log a fault in polluxd itself, at most once a minute: users may cause it as often as they ask."""
        if self._faults.take(""):
            *_, frame = traceback.extract_tb(error.__traceback__)
            place = f"{frame.filename}:{frame.lineno} in {frame.name}"
            said = f"{type(error).__name__}: {str(error)[:500]}"
            log.error(
                "a fault in polluxd itself, a request got no answer: %s (%s); please report it", said, place
            )

    async def _serve(self, endpoint: MessagePath, request: Request, path_job: str | None) -> Any:
        connection: Visitor = request.scope["state"]["connection"]
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        token = token if scheme.lower() == "bearer" else ""
        known = self.tokens.known(token) if endpoint.rights != "anybody" else None
        if known is None:
            await self._strangers.wait(connection.name)
        holder = known or Holder(-1)
        if endpoint.rights != "anybody":
            holder = known or await self.tokens.holder(token, connection)
            if (holder.job_id is None) is not (endpoint.rights == "user"):
                raise http_errors.token_refused(
                    f"this path is for tokens of {'users' if endpoint.rights == 'user' else 'attempts'}"
                )
            connection.recognise(holder, token)
            await self._requests.wait(holder.uid)
        job = _job(path_job)
        message = await _message(endpoint, request)
        return await endpoint.serve(self, Call(holder, token, message, connection, job))

    async def _no_path(self, connection: Visitor) -> Response:
        words = "the gateway does not know this method and path: are the versions the same?"
        try:
            await self._strangers.wait(connection.name)
        except HttpRefusal as too_many:
            return _refusal(too_many)
        return _refusal(HttpRefusal(404, "no-such-path", words))

    async def ask(self, call: Call, statement: Callable[[], T]) -> T:
        """Ask the database in the name of an attempt, in turn."""
        async with self._turns.turn(call.holder.uid):
            return await asyncio.get_running_loop().run_in_executor(self._statements, statement)

    async def question(self, call: Call, ask: Callable[[], Any]) -> bytes:
        """Answer a question of a user, in turn."""
        async with self._questions_of_user.turn(call.holder.uid):
            return await asyncio.get_running_loop().run_in_executor(
                self._asking, lambda: json.dumps(ask(), allow_nan=False).encode()
            )


def _job(text: str | None) -> int:
    """Return the job of a path; 0: the path has none. Raises HttpRefusal."""
    if text is None:
        return 0
    if re.fullmatch(r"[0-9]{1,10}", text) is None or int(text) >= 2**32:
        raise http_errors.not_sensible("expected a job id below 2^32")
    return int(text)


async def _message(endpoint: MessagePath, request: Request) -> Any:
    """Read and check what a request says. Raises Refused."""
    try:
        if endpoint.method == "GET":
            if len(request.scope["query_string"]) > LONGEST_QUERY:
                raise http_errors.not_sensible(f"expected a query of at most {LONGEST_QUERY} bytes")
            return endpoint.reads.model_validate(dict(request.query_params))
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > endpoint.longest:
                raise http_errors.not_sensible(f"expected at most {endpoint.longest} bytes")
        return endpoint.reads.model_validate_json(bytes(body))
    except ValidationError as error:
        raise http_errors.not_sensible(_fault(error)) from None


def _fault(error: ValidationError) -> str:
    """Say what is wrong with the first faulty member.

    Its value may be a secret.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where[:100] or 'the document'}: {first['msg'][:300]}"


async def _token(gateway: GatewayService, call: Call) -> TokenAnswer:
    """Give out a token for a munge credential."""
    answer, holder = await gateway.tokens.issue(call.message, call.connection)
    call.connection.recognise(holder, answer.token)
    return answer


async def _report(gateway: GatewayService, call: Call) -> None:
    """Take in the state of a training."""
    report: ReportMessage = call.message
    async with gateway.reports_of_user.turn(call.holder.uid):
        refusal = await gateway.inbox.store(SentReport(call.holder, report.document()))
    if refusal is not None:
        raise http_errors.of_attempt(refusal)


async def _orders(gateway: GatewayService, call: Call) -> OrdersAnswer:
    """Answer when the orders are not those `seen`, or after 50 s."""
    try:
        return await gateway.watch.orders(call.holder, call.token, call.message.seen)
    except HttpRefusal as refusal:
        if refusal.code == "attempt-over":
            gateway.tokens.forget(call.token)
        raise


async def _acknowledgement(gateway: GatewayService, call: Call) -> Accepted:
    """Take in that the checkpoint of a move is durable, once or again."""
    message: Acknowledgement = call.message
    accepted = await gateway.ask(
        call, partial(gateway.records.acknowledge, call.holder, message.move, message.facts())
    )
    if not isinstance(accepted, bool):
        raise http_errors.of_attempt(accepted)
    return Accepted(accepted=accepted)


async def _training(gateway: GatewayService, call: Call) -> PriorAnswer:
    """Take in which training runs, and return what earlier runs measured."""
    runs: TrainingMessage = call.message
    found = await gateway.ask(
        call, partial(gateway.records.introduce, call.holder, runs.fingerprint, runs.gpu_type)
    )
    if isinstance(found, Mapping):
        return PriorAnswer(prior=payloads.PriorMessage(**found))
    if found is not None:
        raise http_errors.of_attempt(found)
    return PriorAnswer(prior=None)


def _question(
    summary: str, ask: Callable[[Questions, Call], Any]
) -> Callable[[GatewayService, Call], Awaitable[bytes]]:
    """Return what serves a question of a user."""

    async def serve(gateway: GatewayService, call: Call) -> bytes:
        return await gateway.question(call, partial(ask, gateway.questions, call))

    serve.__doc__ = summary
    return serve


_jobs = _question(
    "List the user's jobs in full, and others' as squeue shows them.",
    lambda answers, call: answers.jobs(call.holder.uid, ended=call.message.ended),
)
_top = _question(
    "Return the status, and the jobs that have not ended.", lambda answers, call: answers.top(call.holder.uid)
)
_cluster = _question(
    "Return the status, the jobs that have not ended, the nodes, and the cluster's use over time.",
    lambda answers, call: answers.cluster(call.holder.uid),
)
_explain = _question(
    "Explain the last decision on a job of the user.",
    lambda answers, call: answers.explain(call.holder.uid, call.job),
)
_history = _question(
    "Return the reports of a job of the user.",
    lambda answers, call: answers.history(call.holder.uid, call.job, call.message.since),
)


async def _health(gateway: GatewayService, call: Call) -> HealthAnswer:
    """Tell whether the gateway reaches the database."""
    return HealthAnswer(version=gateway.version, database=await gateway.watch.database())


ENDPOINTS = (
    MessagePath("POST", "/v1/tokens", "anybody", TokenRequest, TokenAnswer, _token),
    MessagePath("POST", "/v1/report", "attempt", ReportMessage, None, _report, payloads.LONGEST_REPORT),
    MessagePath("GET", "/v1/orders", "attempt", OrdersQuestion, OrdersAnswer, _orders),
    MessagePath("POST", "/v1/acknowledgements", "attempt", Acknowledgement, Accepted, _acknowledgement),
    MessagePath("POST", "/v1/training", "attempt", TrainingMessage, PriorAnswer, _training),
    MessagePath("GET", "/v1/jobs", "user", JobsQuestion, None, _jobs),
    MessagePath("GET", "/v1/top", "user", Question, None, _top),
    MessagePath("GET", "/v1/cluster", "user", Question, None, _cluster),
    MessagePath("GET", "/v1/jobs/{job}/explain", "user", Question, None, _explain),
    MessagePath("GET", "/v1/jobs/{job}/history", "user", HistoryQuestion, None, _history),
    MessagePath("GET", "/v1/health", "anybody", Question, HealthAnswer, _health),
)
"""Everything that the gateway answers."""
_BY_PATH: dict[tuple[str, str], MessagePath] = {(each.method, each.path): each for each in ENDPOINTS}


def _asked(scope: Scope) -> tuple[MessagePath | None, str | None]:
    """Return what a request asks for, and the job in its path."""
    job, words = None, scope["path"].split("/")
    if len(words) == 5 and words[2] == "jobs":
        job, words[3] = words[3], "{job}"
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return _BY_PATH.get((method, "/".join(words))), job


def _json(content: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(content, status, headers, media_type="application/json")


def _refusal(refusal: HttpRefusal) -> Response:
    answer = ErrorAnswer(error=ErrorDetail(code=refusal.code, message=refusal.message[:2000]))
    # Refusals have no pace: whoever sends too much has to connect again, and connections have one.
    headers = {"connection": "close"} if refusal.status == 429 else None
    return _json(answer.model_dump_json().encode(), refusal.status, headers)
