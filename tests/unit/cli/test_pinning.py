"""polluxctl pin, unpin, cancel-move: what is ordered of one job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.model import NO_PLACEMENT, Placement, Step

from .conftest import MOVE


@pytest.fixture
def ordered(store, monkeypatch):
    """The store, with the orders that it was given."""
    store.orders = []

    def set_pin(job_id, who, *, pinned):
        store.orders.append((job_id, pinned))
        return job_id == MOVE.job_id

    def cancel_move(job_id, who):
        found = [m for m in store.open_moves() if m.job_id == job_id]
        return found[0] if found else None

    monkeypatch.setattr(store, "set_pin", set_pin, raising=False)
    monkeypatch.setattr(store, "cancel_move", cancel_move, raising=False)
    return store


def test_pin_and_unpin(polluxctl, ordered):
    job = str(MOVE.job_id)
    assert "until `polluxctl unpin" in polluxctl("pin", job).out
    assert polluxctl("unpin", job).status == 0
    assert ordered.orders == [(MOVE.job_id, True), (MOVE.job_id, False)]
    unknown = polluxctl("pin", "999")
    assert unknown.status == 1
    assert "job 999 is not known" in unknown.err
    assert len(unknown.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("step", "status", "says"),
    [
        (Step.PLANNED, 0, "is taken back: it trains on at"),
        (Step.CHECKPOINTED, 0, "within 2 minutes"),
        (Step.REQUEUED, 1, "too late"),
        (Step.TRAINING, 1, "no move under way"),
    ],
)
def test_a_move_is_taken_back_while_its_job_still_runs(polluxctl, ordered, step, status, says):
    ordered.known_moves = [replace(MOVE, step=step)]
    said = polluxctl("cancel-move", str(MOVE.job_id))
    assert said.status == status
    assert says in said.out + said.err


@pytest.mark.parametrize(
    ("path", "changes", "says"),
    [
        (
            "start",
            {"source": NO_PLACEMENT, "step": Step.CONFIGURED},
            "has been told to start and will start on",
        ),
        (
            "park",
            {"target": NO_PLACEMENT, "step": Step.REQUEUED},
            "and waits for GPUs (step requeued): too late",
        ),
        (
            "resize",
            {"target": Placement(("n1", "n2"), 2), "step": Step.STARTED},
            "is growing to n1:2,n2:2: the new nodes are joining it (step started)",
        ),
        (
            "resize",
            {"source": Placement(("n1", "n2"), 2), "target": Placement(("n1",), 2), "step": Step.CONFIGURED},
            "has shrunk to n1:2 already",
        ),
    ],
)
def test_what_cannot_be_taken_back_names_no_placement_that_there_is_not(
    polluxctl, ordered, path, changes, says
):
    ordered.known_moves = [replace(MOVE, path=path, **changes)]
    said = polluxctl("cancel-move", str(MOVE.job_id))
    assert said.status == 1
    assert says in said.err
    assert "none" not in said.err
