"""The sbatch options of a job that its companion jobs repeat.

Slurm counts a companion as a job of its own, and a site's filters look at it like at any other. So it is submitted with
all that its parent's user, the site or an administrator has said of the parent: its account, its reservation, its
memory, and the time that the parent has left. Without that, Slurm would end it after the partition's DefaultTime.

What names nodes is left out: polluxd chooses them. Licenses are left out, since the parent holds them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil

from pollux.slurm_job.allocation import fewest_cpus

_NOTHING = ("", "(null)", "N/A", "Unknown")
_POLLUXD_S_OWN = "pollux: "
"""What the submission hook's own comment begins with."""


def parent_options(shown: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return options of sbatch(1) by name; one whose value is empty has none. `environ`: of a process of the parent.

    `shown`: the parent's record, as `scontrol -o show job` prints it; empty where Slurm did not answer.
    """
    # A job's name comes first, and paths and comments last: all of them may have blanks.
    middle = shown.partition(" UserId=")[2].partition(" Command=")[0]
    fields = {key: value for key, value in re.findall(r" ([\w:/]+)=(\S*)", middle) if value not in _NOTHING}
    wckey, nice = fields.get("WCKey", ""), fields.get("Nice", "0")
    return {
        "partition": environ.get("SLURM_JOB_PARTITION", ""),
        "account": environ.get("SLURM_JOB_ACCOUNT", ""),
        "qos": environ.get("SLURM_JOB_QOS", ""),
        **_cpus(fields, environ),
        "time": _time_left(fields),
        # A star is before the user's default key.
        "wckey": "" if wckey.startswith("*") else wckey,
        "nice": nice if nice.isdigit() and nice != "0" else "",
        "reservation": fields.get("Reservation", ""),
        "constraint": fields.get("Features", ""),
        **_memory(fields, shown),
        **({"exclusive": "exclusive"} if fields.get("OverSubscribe") == "NO" else {}),
        "comment": _comment(shown),
        "output": _output(shown),
    }


def _time_left(fields: Mapping[str, str]) -> str:
    """The rest of the parent's time limit, in whole minutes."""
    limit = fields.get("TimeLimit", "")
    if limit == "UNLIMITED":
        return limit
    whole, past = _seconds(limit), _seconds(fields.get("RunTime", ""))
    return "" if whole is None or past is None else str(max(1, ceil((whole - past) / 60)))


def _seconds(text: str) -> int | None:
    """Seconds of `D-HH:MM:SS` or `HH:MM:SS`, as scontrol writes them."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _cpus(fields: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The CPUs of one of the parent's nodes, as they were given or, with fewer threads of each core, as asked for."""
    threads = fields.get("ReqB:S:C:T", "").rpartition(":")[2]
    cpus = fewest_cpus(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    counts = [fields.get(key, "").partition("-")[0] for key in ("NumTasks", "CPUs/Task", "NumNodes")]
    if threads.isdigit() and all(count.isdigit() and count != "0" for count in counts):
        tasks, each, nodes = map(int, counts)
        return {"cpus-per-task": str(max(1, tasks * each // nodes)), "threads-per-core": threads}
    return {"cpus-per-task": str(cpus or "")}


def _memory(fields: Mapping[str, str], shown: str) -> dict[str, str]:
    """What was asked for. Slurm shows the site's memory per GPU beside it, and 0 for all of a node or for nothing."""
    for key, option in (("MinMemoryNode", "mem"), ("MinMemoryCPU", "mem-per-cpu")):
        if fields.get(key, "0") != "0":
            return {option: fields[key]}
    by_gpu = re.search(r" MemPerTres=(gres[:/])?gpu:(\d+)", shown)
    if re.search(r" AdminComment=pollux:[^\n]* mem-asked=yes ", shown) and not (by_gpu and by_gpu[1]):
        return {"mem": "0"}
    return {"mem-per-gpu": by_gpu[2]} if by_gpu else {}


def _comment(shown: str) -> str:
    found = re.search(r" Comment=(.*?) StdErr=", shown, re.DOTALL)
    text = found[1] if found else ""
    return "" if text in _NOTHING or text.startswith(_POLLUXD_S_OWN) else text


def _output(shown: str) -> str:
    """Where the parent's output goes. Empty where Slurm does not say: sbatch then chooses."""
    found = re.search(r" StdOut=(/.*?)(?: \w+=|$)", shown)
    # A percent sign is sbatch's own.
    return found[1].replace("%", "%%") if found else ""
