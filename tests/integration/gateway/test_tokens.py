"""Tokens for munge credentials of real users."""

from __future__ import annotations

import json
import pwd
import secrets
import subprocess
import time

import pytest

from pollux.scheduler.munge import Munge
from polluxd.gateway.client import munge_socket
from polluxd.model import JobState
from tests.integration.gateway.serving import PATIENCE_S, Caller, serving
from tests.integration.store.reports import payload

pytestmark = pytest.mark.slurm

ADA, BOB = (pwd.getpwnam(name) for name in ("nobody", "games"))


@pytest.fixture(scope="module")
def socket_of_munge(dev_cluster):
    return munge_socket(dev_cluster.command("scontrol", "show", "config"))


@pytest.fixture
def url(records, cluster, socket_of_munge):
    with serving(records, cluster=cluster, munge=Munge(socket_of_munge), interval_s=12.5) as found:
        yield found


@pytest.fixture
def credential(dev_cluster, socket_of_munge):
    """Makes a credential in the name of a user."""

    def make(user, **changes):
        purpose = {
            "purpose": "attempt",
            "cluster": "",
            "job": 7,
            "attempt": 0,
            "nonce": secrets.token_hex(16),
        }
        made = subprocess.run(
            [
                "munge",
                "--zip=zlib",
                "--socket",
                str(socket_of_munge),
                "--string",
                changes.get("text") or json.dumps(purpose | changes),
            ],
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=[],
            capture_output=True,
            timeout=PATIENCE_S,
            check=True,
            env=dev_cluster.client_environment,
            cwd="/",
        )
        return {"credential": made.stdout.decode().strip()}

    return make


@pytest.fixture
def ada(store, seen):
    """The job of ada that runs."""
    job = seen(7, uid=ADA.pw_uid, restart_count=1)
    store.sync_jobs([job])
    return job


def test_a_user_gets_a_token_of_the_own_attempt(url, credential, ada, cluster, store):
    nonce = secrets.token_hex(16)
    status, answer = Caller(url).ask("POST", "/v1/tokens", credential(ADA, attempt=1, nonce=nonce))
    assert status == 200
    assert answer["token"].startswith("J.7.1.")
    del answer["token"]
    assert answer == {
        "cluster": cluster,
        "publish_interval_s": 12.5,
        "gpu_type": "",
        "expires_s": None,
        "nonce": nonce,
    }


def test_the_token_opens_that_attempt(url, credential, ada, store, postgres):
    _, answer = Caller(url).ask("POST", "/v1/tokens", credential(ADA, attempt=1))
    assert Caller(url, answer["token"]).ask("POST", "/v1/report", payload())[0] == 204
    assert store.reports()[7].attempt == 1
    dump = subprocess.run(
        ["psql", postgres.admin_url.replace("+psycopg2", ""), "-c", "SELECT * FROM pollux.token"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer["token"].rpartition(".")[2] not in dump.stdout, "the database has its hash alone"


def test_no_user_gets_a_token_of_anothers_job(url, credential, ada):
    assert Caller(url).code("POST", "/v1/tokens", credential(BOB, attempt=1)) == (403, "not-yours")


def test_attempts_that_are_over_to_come_or_far_away(url, credential, ada, store, seen):
    asking = Caller(url)
    assert asking.code("POST", "/v1/tokens", credential(ADA, attempt=0)) == (409, "attempt-over")
    assert asking.ask("POST", "/v1/tokens", credential(ADA, attempt=2))[0] == 200
    assert asking.code("POST", "/v1/tokens", credential(ADA, attempt=3)) == (503, "not-known-yet")
    assert asking.code("POST", "/v1/tokens", credential(ADA, attempt=2_000_000_001)) == (503, "not-known-yet")
    assert asking.code("POST", "/v1/tokens", credential(ADA, job=8)) == (503, "not-known-yet")
    assert asking.code("POST", "/v1/tokens", credential(ADA, cluster="other", attempt=1)) == (
        403,
        "not-yours",
    )
    store.sync_jobs(
        [seen(7, uid=ADA.pw_uid, restart_count=1, state=JobState.COMPLETED, end_time=time.time())]
    )
    assert asking.code("POST", "/v1/tokens", credential(ADA, attempt=1)) == (409, "attempt-over")


def test_a_credential_counts_once(url, credential, ada):
    asking, mine = Caller(url), credential(ADA, attempt=1)
    assert asking.ask("POST", "/v1/tokens", mine)[0] == 200
    status, answer = asking.ask("POST", "/v1/tokens", mine)
    assert (status, answer["error"]["code"]) == (401, "token-refused")
    assert "replayed" in answer["error"]["message"].lower()


def test_what_is_no_credential(url, credential, ada):
    asking = Caller(url)
    good = credential(ADA, attempt=1)["credential"]
    for text in (good[:-20] + "AAAAAAAAAAAAAAAAAAA:", "MUNGE:AwQDAAD:", "MUNGE:" + "A" * 1000 + ":"):
        assert asking.code("POST", "/v1/tokens", {"credential": text}) == (401, "token-refused")
    for document in ({"credential": "x"}, {"credential": 1}, {}, {"credential": "MUNGE:" + "A" * 3000 + ":"}):
        assert asking.code("POST", "/v1/tokens", document) == (422, "refused")
    packed = json.dumps({"purpose": "user", "nonce": "ab" * 16}) + " " * 100_000  # in less than 2 kB
    for text in ("{}", "[", "[" * 1000, "null", json.dumps({"purpose": "root", "nonce": "a" * 32}), packed):
        assert asking.code("POST", "/v1/tokens", credential(ADA, text=text)) == (422, "refused")
    for changes in ({"job": 0}, {"job": 2**32}, {"job": "7"}, {"attempt": -1}, {"nonce": "x"}, {"more": 1}):
        assert asking.code("POST", "/v1/tokens", credential(ADA, **changes)) == (422, "refused")


def test_a_user_of_polluxctl_gets_a_token_for_questions(url, credential, ada):
    text = json.dumps({"purpose": "user", "nonce": "ab" * 16})
    status, answer = Caller(url).ask("POST", "/v1/tokens", credential(BOB, text=text))
    assert (status, answer["expires_s"], answer["nonce"]) == (200, 600.0, "ab" * 16)
    user = Caller(url, answer["token"])
    assert user.ask("GET", "/v1/jobs") == (200, [BOB.pw_uid, False])
    assert user.code("POST", "/v1/report", payload()) == (401, "token-refused")


def test_many_credentials_that_are_no_good_leave_good_ones_their_way(url, credential, ada):
    flood = Caller(url)
    for _ in range(200):
        assert flood.code("POST", "/v1/tokens", {"credential": "MUNGE:AwQDAAD:"}) == (401, "token-refused")
    status, answer = Caller(url).ask("POST", "/v1/tokens", credential(ADA, attempt=1))
    assert status == 200
    assert Caller(url, answer["token"]).ask("POST", "/v1/report", payload())[0] == 204


def test_one_user_gets_so_many_tokens_and_another_one_still_gets_his(url, credential, store, seen):
    store.sync_jobs([seen(7, uid=ADA.pw_uid), seen(8, uid=BOB.pw_uid)])
    asking = Caller(url)
    # Made before: the budget refills while a busy machine runs munge.
    credentials = [credential(ADA) for _ in range(120)]
    assert 429 in {asking.ask("POST", "/v1/tokens", each)[0] for each in credentials}
    assert asking.ask("POST", "/v1/tokens", credential(BOB, job=8))[0] == 200
