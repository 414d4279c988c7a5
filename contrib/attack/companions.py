"""Attacks by companion jobs: limits escaped, parents outlived or taken."""

from __future__ import annotations

from dataclasses import replace

from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site
from contrib.attack.training import training as alices_training
from polluxd.apply.companions import gather
from polluxd.model import JobState, Move, Placement

FAKE_NONCE = "0" * 32


def _line(parent: int, move: int, nonce: str) -> str:
    return f"#POLLUX companion-of={parent} attempt=0 move={move} nonce={nonce}"


def _companion(site: Site, line: str, nodes: int = 1) -> int:
    """Submit mallory's companion job, which sleeps."""
    options = (f"--nodes={nodes}", "--ntasks-per-node=1", "--gres=gpu:1", "--no-requeue")
    return site.submit("mallory", site.script("companion.sh", line), *options)


def _ended(site: Site, job_id: int) -> bool:
    job = site.slurm.jobs([job_id]).get(job_id)
    return job is None or job.state.finished or job.state is JobState.COMPLETING


def _growing(site: Site) -> tuple[int, Move, str]:
    """Have polluxd grow a job of mallory's; return job, move and nonce."""
    parent = site.pollux_job("mallory", "max-gpus=2")
    site.reported("mallory", parent, resize="in-place")
    nodes = site.job(parent).nodes
    move = site.plan(parent, Placement(nodes, 1), Placement((*nodes, site.free_nodes()[0]), 1))
    return parent, move, str(site.ordered("mallory", parent, "resize")["nonce"])


@attack("mallory", "further: a companion that nobody asked for holds GPUs beside the plan")
def nobody_asked(site: Site) -> Outcome:
    """It would start when its lease ends."""
    parent = site.resident("mallory")
    with site.hook("pollux_config.lease_s = 12\n"):
        job_id = _companion(site, _line(parent, 999_999, FAKE_NONCE))
        site.until(lambda: site.held(job_id) or _ended(site, job_id), "its start or end", 60.0)
        held = site.held(job_id)
    return Outcome(held > 0, f"the companion holds {held} GPUs; ended: {_ended(site, job_id)}")


@attack("mallory", "further: a companion that asks for three nodes where its move adds one")
def more_than_ordered(site: Site) -> Outcome:
    parent, move, nonce = _growing(site)
    job_id = _companion(site, _line(parent, move.id, nonce), 3)
    site.until(lambda: site.held(job_id) or _ended(site, job_id), "its start or end", 40.0)
    held = site.held(job_id)
    return Outcome(held > 1, f"the move adds {move.added}; the companion holds {held} GPUs")


@attack("mallory", "further: a companion that outlives its parent")
def outlives_its_parent(site: Site) -> Outcome:
    parent, move, nonce = _growing(site)
    job_id = _companion(site, _line(parent, move.id, nonce))
    site.until(lambda: site.held(job_id), "the companion's start", 40.0)
    site.cluster.command("scancel", str(parent))
    try:
        site.until(lambda: _ended(site, job_id), "its end", 25.0)
    except TimeoutError:
        return Outcome(True, f"the parent has ended, the companion holds {site.held(job_id)} GPUs")
    return Outcome(False, "the companion ended with its parent")


@attack("mallory", "further: a plain job named like the mark of a companion of his own elastic job")
def named_like_its_mark(site: Site) -> Outcome:
    """A plain job starts by itself, so it would lend GPUs that no plan gave."""
    parent, move, nonce = _growing(site)
    mark = f"pollux:v1 companion-of={parent} attempt=0 move={move.id} nonce={nonce}"
    options = (f"--job-name={mark}", "--gres=gpu:1", "--ntasks=1", f"--nodelist={move.added.nodes[0]}")
    job_id = site.submit("mallory", site.script("plain.sh"), *options)
    site.until(lambda: site.held(job_id), "its start")
    state = site.slurm.observe()
    view = gather(state, {move.id: replace(move, nonce=nonce)})
    taken = [job.job_id for job in (*view.pending_companions.values(), *view.orphans)]
    taken += [companion.job_id for job in view.state.jobs for companion in job.companions]
    foreign = sum(node.foreign_gpus for node in state.nodes)
    return Outcome(job_id in taken, f"companions of move {move.id}: {taken}; {foreign} GPUs count as foreign")


@attack("mallory", "further: a plain job named like the companion of alice's job, during her grow")
def named_like_hers(site: Site) -> Outcome:
    """A reader that cancels or adopts by name would take his job, too."""
    training = alices_training(site)
    with training.growing() as move:
        name = f"{site.slurm.jobs([training.job_id])[training.job_id].name}.companion"
        job_id = site.submit("mallory", site.script("plain.sh"), f"--job-name={name}", "--ntasks=1")
        view = gather(site.slurm.observe(), {move.id: move})
        taken = {job.job_id for job in (*view.pending_companions.values(), *view.orphans)}
    return training.harmed(
        f"companions of move {move.id}: {sorted(taken)}; his job is {job_id}",
        job_id in taken or _ended(site, job_id),
    )


@attack(
    "mallory", "row 5, during a grow: mallory's companion in the place of the one that alice's agent submits"
)
def taken_for_hers(site: Site) -> Outcome:
    """Ids of moves count up, and the lower job id would be taken first."""
    training = alices_training(site)
    with training.growing() as move:
        job_ids = [_companion(site, _line(training.job_id, move.id, FAKE_NONCE)) for _ in range(3)]
        training.ended(move.id)
        site.until(lambda: all(_ended(site, job_id) for job_id in job_ids), "the end of his companions")
    held = site.held(*job_ids)
    return training.harmed(f"mallory's companions hold {held} GPUs", held > 0)
