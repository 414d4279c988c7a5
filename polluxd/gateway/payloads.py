"""One model per message; the only check of what users' processes send.

Whatever a model accepts can be stored, and crashes nothing that reads it: numbers are finite and bounded, texts
printable and short, members known. Times are POSIX seconds, by the sender's clock.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

LONGEST_REPORT = 4096
"""Bytes of a report, as it is sent; stored with its keys it has at most 2,048, as Postgres counts."""
LONGEST = 4096
"""Bytes of any other message."""
_AHEAD_S = 300.0
"""How far ahead of ours a node's clock may be."""


def _not_ahead(value: float) -> float:
    if value > time.time() + _AHEAD_S:
        raise ValueError("it lies in the future: set the clock of the node")
    return value


def _one_line(value: str, most: int = 300) -> str:
    # A semicolon ends a sentence of polluxd's own (`actions.sentences`).
    line = "".join(letter if letter.isprintable() and letter != ";" else " " for letter in value)
    return line.encode()[:most].decode(errors="ignore")


def _sentence(value: str) -> str:
    return _one_line(value, 160)


Stamp = Annotated[float, Field(ge=0), AfterValidator(_not_ahead)]
Amount = Annotated[float, Field(ge=0, le=1e12)]
Pace = Annotated[float, Field(ge=0, le=1e6)]
"""Seconds per pass, per example or per GPU; a pass of eleven days is no fit."""
Moment = Annotated[float, Field(ge=0, le=1e300)]
Steps = Annotated[float, Field(ge=0, le=1e15)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
Examples = Annotated[int, Field(ge=1, le=2**31 - 1)]
Gpus = Annotated[int, Field(ge=0, le=1_000_000)]
Nodes = Annotated[int, Field(ge=0, le=1_000_000)]
MoveId = Annotated[int, Field(ge=1, le=9 * 10**15)]
JobId = Annotated[int, Field(ge=1, lt=2**32)]
Attempt = Annotated[int, Field(ge=0, lt=2**31 - 1)]
Nonce = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
GpuType = Annotated[str, StringConstraints(pattern=r"^[ -~]{0,64}$")]
Fingerprint = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16,64}$")]
ClusterName = Annotated[str, StringConstraints(max_length=40)]


class Message(BaseModel):
    """A JSON document without unknown fields, or words for numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class AttemptCredential(Message):
    """What the munge credential of a job's process holds."""

    purpose: Literal["attempt"]
    cluster: ClusterName = ""
    """ClusterName of slurm.conf; empty where the process does not know it."""
    job: JobId
    attempt: Attempt
    """SLURM_RESTART_COUNT."""
    nonce: Nonce


class UserCredential(Message):
    """What the munge credential of `polluxctl` holds."""

    purpose: Literal["user"]
    nonce: Nonce


class TokenRequest(Message):
    """Ask for a token: the credential shows who asks."""

    credential: Annotated[str, StringConstraints(max_length=2048, pattern=r"^MUNGE:[A-Za-z0-9+/=]+:$")]
    """Text that munge_encode(3) made of an AttemptCredential or UserCredential."""


class TokenAnswer(Message):
    """A token, and what its holder needs to know."""

    token: str
    cluster: str
    publish_interval_s: float
    """Time between two reports [s]."""
    gpu_type: str
    """Type of the job's GPUs, where the gateway knows it."""
    expires_s: float | None
    """Seconds for which the token lives; null: as long as the attempt."""
    nonce: str
    """That of the credential: the answer belongs to it."""


class Params(Message):
    """theta of the throughput model: seconds, and gamma without a unit."""

    alpha_grad: Pace
    beta_grad: Pace
    alpha_local: Pace
    beta_local: Pace
    alpha_node: Pace
    beta_node: Pace
    gamma: Annotated[float, Field(ge=1, le=10)]
    alpha_rack: Pace | None = None
    beta_rack: Pace | None = None

    @model_validator(mode="after")
    def _both_of_racks(self) -> Self:
        if (self.alpha_rack is None) != (self.beta_rack is None):
            raise ValueError("expected alpha_rack and beta_rack, or none of them")
        return self


class Noise(Message):
    """Statistics of the gradient."""

    sqr: Moment
    """Squared norm of the true gradient."""
    var: Moment
    """Trace of the covariance of a gradient over the initial batch size."""


class LimitsMessage(Message):
    """Batch sizes that the job allows [examples]."""

    initial: Examples
    maximum: Examples
    local_min: Examples
    local_max: Examples
    halves: bool = False
    """One GPU can make a measured step in two passes of half its examples."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.maximum < self.initial or self.local_max < self.local_min:
            raise ValueError("expected initial <= maximum and local_min <= local_max")
        return self


class TimesMessage(Message):
    """When this attempt reached each stage of its start."""

    launched_at: Stamp | None = None
    imported_at: Stamp | None = None
    rendezvous_at: Stamp | None = None
    attached_at: Stamp | None = None
    restored_at: Stamp | None = None
    first_step_at: Stamp | None = None


class AdviceMessage(Message):
    """In mode `advise`, the better batch size."""

    batch_size: Examples
    local_batch: Examples
    accumulation: Whole
    goodput_ratio: Amount


class ResizeRefused(Message):
    """A move that the agent could not carry out."""

    id: MoveId
    why: Annotated[str, StringConstraints(max_length=4096), AfterValidator(_one_line)] = ""


class ReportMessage(Message):
    """The present state of a training."""

    v: Literal[1] = 1
    at: Stamp
    params: Params | None = None
    noise: Noise | None = None
    limits: LimitsMessage
    explored_gpus: Gpus
    explored_nodes: Nodes
    measured_gpus: Gpus | None = None
    """Most GPUs measured on `gpu_type`; `explored_gpus` counts every type."""
    measured_nodes: Nodes | None = None
    prior_gpus: Gpus | None = None
    """Most GPUs that the fit takes from earlier runs."""
    prior_nodes: Nodes | None = None
    prior_refuted: bool | None = None
    gpu_type: GpuType | None = None
    local_max_by_type: Annotated[dict[GpuType, Examples], Field(max_length=8)] | None = None
    """Most examples per pass on GPU types where one has run out of memory; "": on others. polluxd passes over
    types that the cluster does not have."""
    gpus: Gpus
    nodes: Nodes
    batch_size: Whole
    local_batch: Whole
    accumulation: Whole
    goodput: Amount
    """Examples per second, times efficiency."""
    throughput: Amount
    """Examples per second."""
    data_wait: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the training time spent waiting for the data loader."""
    progress: Steps
    """Steps of the initial batch size."""
    target: Steps | None = None
    epoch: Amount
    lr_factor: Amount
    gain: Amount
    optimizer_steps: Annotated[int, Field(ge=0, le=10**15)]
    checkpointed: bool
    times: TimesMessage | None = None
    mode: Literal["observe", "advise", "enforce"] | None = None
    advice: AdviceMessage | None = None
    resize: Literal["in-place", "requeue"] | None = None
    """The fastest way to change the job's size."""
    resized: Annotated[int, Field(ge=0, le=9 * 10**15)] | None = None
    """Newest resize in effect; 0: none in this attempt."""
    resize_refused: ResizeRefused | None = None
    immovable: Annotated[str, StringConstraints(max_length=4096), AfterValidator(_sentence)] | None = None
    """Why the job can follow no order to move now; null: it can."""
    resize_cost: Seconds | None = None
    barred: Annotated[str, StringConstraints(max_length=4096), AfterValidator(_one_line)] | None = None
    """Why `limits` or `least_gpus` leave sizes out at which the trainer did not start."""
    least_gpus: Gpus | None = None
    """Fewest GPUs on which the trainer starts."""
    next_save_s: Seconds | None = None
    """Seconds until the trainer's own next checkpoint, which a move waits for; null: it saves when it is asked."""
    search_rank: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of a trial among the trials of its search that made the same progress; 1: the best. It only divides the search's
    weight."""

    def document(self) -> dict[str, Any]:
        """Return what is stored of the report, and read as a `polluxd.model.Report`: what was said, without nulls."""
        return self.model_dump(exclude={"v"}, exclude_none=True)


class Acknowledgement(Message):
    """The checkpoint that a move asked for is durable."""

    move: MoveId
    last_step_at: Stamp | None = None
    stopped_at: Stamp | None = None
    checkpoint_s: Seconds | None = None
    step: Steps | None = None

    def facts(self) -> dict[str, float]:
        return self.model_dump(exclude={"move"}, exclude_none=True)


class Accepted(Message):
    """Answer to an acknowledgement."""

    accepted: bool
    """The move counts on the checkpoint."""


class TrainingMessage(Message):
    """Which training an attempt runs, on which GPU type."""

    fingerprint: Fingerprint
    gpu_type: GpuType = ""


class PriorMessage(Message):
    """What the same user's earlier runs of the training measured."""

    params: dict[str, float]
    explored_gpus: int
    explored_nodes: int


class PriorAnswer(Message):
    """Answer to a training; null: nothing was measured."""

    prior: PriorMessage | None


class Resize(Message):
    """An order to resize within the allocation."""

    id: int
    path: Literal["resize"]
    kind: Literal["grow", "shrink"]
    nodes: list[str]
    gpus_per_node: int
    step: str
    nonce: str = ""
    """With `grow`: what the companion job states."""


class OrdersAnswer(Message):
    """What the attempt is to do now."""

    seen: str
    """To send with the next question."""
    drain: int | None
    """Id of the move to save a checkpoint and stop for."""
    resize: Resize | None


class HealthAnswer(Message):
    """State of a gateway."""

    version: str
    database: bool


class Question(BaseModel):
    """No parameters; further questions add theirs. A URL has all values as text, so this is no `Message`."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OrdersQuestion(Question):
    """Wait until the orders are not those `seen`, for 50 s at most."""

    seen: Annotated[str, StringConstraints(max_length=64)] = ""


class JobsQuestion(Question):
    """List the jobs."""

    ended: bool = False


class HistoryQuestion(Question):
    """List the reports of a job since a POSIX time."""

    since: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] = 0.0


class ErrorDetail(Message):
    """What went wrong."""

    code: str
    message: str


class ErrorAnswer(Message):
    """Answer to a request that was refused."""

    error: ErrorDetail
