"""Attack a growth in place, which must succeed in spite of the attack."""

from __future__ import annotations

from contrib.attack import database, slurm_text, tokens
from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site


@attack("mallory", "row 1, during a grow: names that stop polluxd, in a growth in place")
def names(site: Site, defended: bool) -> Outcome:
    if not defended:
        return slurm_text.name_stops_polluxd(site, False)
    training = site.training()
    ghost = f"JobId={training.job_id} JobName=y UserId=root(0) GroupId=root(0) JobState=COMPLETED Restarts=7"
    texts = ("x UserId=a(1) GroupId=b TimeLimit=zz", f"x\n{ghost}", f"x {ghost} NodeList=n1 NumNodes=1")
    with training.growing() as move, site.without_text_guard():
        for name in texts:
            job_id, trouble = site.sbatch("mallory", site.script("named.sh"), f"--job-name={name}")
            assert job_id is not None, trouble
        grown = training.ended(move.id)
    lives = training.goes_on()
    return Outcome(
        grown.step != "training" or not lives,
        f"the growth ended as {grown.step}; the training goes on: {lives}",
    )


@attack("mallory", "row 10, during a grow: an open transaction after reports, in a growth in place")
def transaction(site: Site, defended: bool) -> Outcome:
    if not defended:
        return database.cycle_frozen(site, False)
    training = site.training()
    calls = (
        "SELECT pollux.prior_v1({me}, repeat('ab', 16), '')",
        "SELECT pollux.acknowledge_v1({me}, 1, '{}')",
    )
    with training.growing() as move:
        said = database.hold(site, *calls)
        grown = training.ended(move.id)
    return Outcome(grown.step != "training", f"the growth ended as {grown.step}; mallory: {said[-1]}")


@attack("mallory", "row 21, during a grow: an order to grow, and its nonce, asked with mallory's own token")
def order_asked(site: Site, defended: bool) -> Outcome:
    training = site.training()
    hers, uid = training.job_id, site.uid("alice")
    words = [
        f"SELECT pollux.instructions_v1({{cluster}}, {hers}, 0, {who}, {{token}})"
        for who in (uid, site.uid("mallory"))
    ]
    with training.growing() as move:
        site.until(training.meeting, "the file for the joiners", 60.0)
        if defended:
            answers = site.sql("mallory", *words, "SELECT nonce FROM pollux.move")
        else:
            with site.rewritten(tokens.AUTHORISE, *tokens.ANYBODY):
                answers = site.sql("mallory", *words)
        grown = training.ended(move.id)
    told = any(answer.ok and (defended or move.nonce in answer.text) for answer in answers)
    return Outcome(
        told or (defended and grown.step != "training"),
        f"{answers[0].text[:200]}; the growth ended as {grown.step}",
    )
