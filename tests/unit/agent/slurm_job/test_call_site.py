"""What the arguments of the calls around `attach` say of a training."""

from typing import Any

from pollux.slurm_job.call_site import call_site


def called(data: Any) -> dict[str, str]:
    return dict(call_site().arguments)


def test_a_genome_as_an_argument_is_looked_at_once() -> None:
    # Looked at from each of its letters, it would take hours.
    assert called("ACGT" * 500_000) != called("GCAT" * 500_000)


def test_drawn_names_and_times_do_not_tell_trainings_apart() -> None:
    assert called("out/run-20261128 at 10:30:11") == called("out/run-20261129 at 11:31:12")
    assert called("out/small") != called("out/large")
    assert called(0.0005) != called(0.0001)
    assert called(1024) != called(2048)
