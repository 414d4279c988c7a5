"""Running jobs, plain and Pollux, whose GPUs do nothing: seen by Prometheus, told to administrators and to owners.

Nothing here ends or changes a job.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from polluxd.config.settings import MetricsSettings
from polluxd.errors import PolluxError
from polluxd.model import JobState
from polluxd.printable import printable
from polluxd.slurm.scontrol import ScontrolClient

_LARGEST = 16 << 20
"""Bytes of an answer that are read."""
_TIMEOUT_S = 10.0
_MAIL_PROG = re.compile(r"^MailProg\s*=\s*(/\S+)\s*$", re.MULTILINE)

Row = dict[str, Any]


def idle_jobs(settings: MetricsSettings) -> list[Row]:
    """Return the running jobs with GPUs that do nothing, those with the most first.

    Raises PolluxError: Prometheus or Slurm does not answer, or Prometheus answers something else.
    """
    if not settings.prometheus:
        return []
    idle = _asked(settings)
    jobs = ScontrolClient().jobs([*idle, 0]) if idle else {}  # of one job alone, scontrol shows a refusal
    rows = []
    for job_id, job in jobs.items():
        gpus = sum(job.gpus_per_node_held.values())
        if job.state is JobState.RUNNING and gpus:
            names = {"job_id": job_id, "name": job.name, "user": job.user, "account": job.account}
            rows.append(
                {**names, "pollux": job.spec is not None, "gpus": gpus, "idle": min(idle[job_id], gpus)}
            )
    return sorted(rows, key=lambda row: (-row["idle"], row["job_id"]))


def _asked(settings: MetricsSettings) -> dict[int, int]:
    """Return the number of GPUs that do nothing, by job id."""
    url = f"{settings.prometheus.rstrip('/')}/api/v1/query?{urlencode({'query': settings.idle_query})}"
    try:
        with urlopen(url, timeout=_TIMEOUT_S) as answer:
            document = json.loads(answer.read(_LARGEST))
        found = {}
        for series in document["data"]["result"]:
            (job,) = series["metric"].values()
            if re.fullmatch(r"[0-9]{1,10}", job) and (gpus := int(float(series["value"][1]))) > 0:
                found[int(job)] = gpus
    except (URLError, OSError, ValueError) as error:
        raise PolluxError(
            f"metrics.prometheus ({settings.prometheus}) does not tell which GPUs do nothing: {error}"
        ) from None
    except (KeyError, TypeError, AttributeError):
        raise PolluxError(
            "metrics.idle_query: expected an answer with one label, the job id, and a number of GPUs"
        ) from None
    return found


def mail(rows: Sequence[Row]) -> list[str]:
    """Mail the owners by Slurm's MailProg, one mail per job; return what failed. Raises PolluxError: it has none."""
    found = _MAIL_PROG.search(ScontrolClient().ask("scontrol", "show", "config"))
    if found is None:
        raise PolluxError("slurm.conf names no MailProg by its path: owners cannot be told")
    failed = []
    for row in rows:
        name = printable(row["name"])
        subject = f"Slurm job {row['job_id']}: {row['idle']} of {row['gpus']} GPUs do nothing"
        body = (
            f"{row['idle']} of the {row['gpus']} GPUs of your job {row['job_id']} ({name}) have done nothing "
            f"for a while, and others may wait for them. End the job if it hangs: scancel {row['job_id']}\n"
        )
        words = [found[1], "-s", subject, row["user"]]
        try:
            subprocess.run(words, input=body, text=True, capture_output=True, timeout=_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            failed.append(f"no mail about job {row['job_id']}: {error}")
    return failed
