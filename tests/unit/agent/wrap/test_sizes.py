"""What attempts of a wrapped job leave to later ones, and the throughput that follows."""

from __future__ import annotations

import pytest

from pollux.goodput import step_time
from pollux.wrap.sizes import Sizes, of_training

GOOD = (
    '{"rows": [[1, 1, 8, 0.5]], "bad": {}, "fruitless": 0, "every": null, "step": 0, "line": "", "start": 0, '
    '"deaf": false, "ended": -1}'
)


def predicted(sizes, nodes, gpus, batch=48):
    return float(step_time(sizes.fitted(), nodes, gpus, batch / gpus))


def test_what_is_written_is_read_again(tmp_path):
    rows = {(1, 1, 48): 0.5, (2, 8, 48): 0.1}
    sizes = Sizes(rows, {4: "status 1: no"}, 2, 170.0, 7.0, r"step (\d+)", 31.0, True, 0)
    file, none = of_training(tmp_path / "job", "out/step-*", 1)
    assert none == Sizes()
    sizes.write(file)
    assert Sizes.read(file) == sizes
    assert Sizes.read(tmp_path / "none") == Sizes()


def test_two_trainers_of_one_job_have_a_file_each(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    one, _ = of_training(tmp_path, "tmp/a/step-*", 1)
    assert one == of_training(tmp_path, "/tmp/a/step-*", 1)[0]
    assert one != of_training(tmp_path, "tmp/b/step-*", 1)[0]
    Sizes(ended=1).write(one)
    other, sizes = of_training(tmp_path, "tmp/a/step-*", 1)
    assert (other != one, sizes) == (True, Sizes()), "what has ended in this attempt is not what begins"
    assert of_training(tmp_path, "tmp/a/step-*", 2)[0] == one


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[1]", "[" * 100_000, GOOD.replace("[1, 1", "[2, 1"), GOOD.replace("0.5", "-1")),
        *(GOOD.replace("null", "NaN"), GOOD.replace('"step": 0', '"step": Infinity')),
        GOOD.replace('"start": 0', '"start": -1'),
    ],
)
def test_a_file_that_makes_no_sense_says_nothing(tmp_path, text):
    (tmp_path / "wrap.json").write_text(GOOD)
    assert Sizes.read(tmp_path / "wrap.json") == Sizes({(1, 1, 8): 0.5})
    (tmp_path / "wrap.json").write_text(text)
    assert Sizes.read(tmp_path / "wrap.json") == Sizes()


def test_sizes_that_failed_bound_those_that_are_allowed():
    rows = {(1, 1, 8): 1.0, (1, 2, 8): 0.6}
    assert Sizes(rows).most_allowed() is None
    assert Sizes(rows, {4: ""}).most_allowed() == 2
    assert Sizes({}, {4: ""}).most_allowed() == 3
    assert Sizes({(1, 4, 8): 0.5}, {1: ""}).most_allowed() is None
    assert Sizes({(1, 4, 8): 0.5}, {1: ""}).least_allowed() == 4, "more memory for each GPU"
    assert (Sizes(rows, {4: ""}).least_allowed(), Sizes({}, {4: ""}).least_allowed()) == (1, 1)


@pytest.mark.parametrize(
    ("known", "wanted", "error"),
    [
        (((1, 1), (1, 2)), (1, 4), 0.1),
        # A node's border: without guessed rows all that does not divide is taken for a constant (40 % too slow).
        (((1, 8), (2, 16)), (4, 32), 0.2),
        (((1, 8), (2, 16), (4, 32)), (8, 64), 0.2),
    ],
)
def test_the_next_size_is_predicted(known, wanted, error):
    def truth(nodes, gpus):
        return 0.02 + 1.6 / gpus + (0.0 if gpus == 1 else 0.01 + 0.001 * gpus + 0.01 * (nodes > 1))

    batch = 1536
    sizes = Sizes({(*size, batch): truth(*size) for size in known})
    assert predicted(sizes, *wanted, batch) == pytest.approx(truth(*wanted), rel=error)


def test_the_reason_names_the_size_that_failed():
    assert Sizes({(1, 1, 8): 1.0}, {4: "status 1: no", 2: "status 1: cannot resume"}).barred() == (
        "its trainer did not start on 2 GPUs (status 1: cannot resume)"
    )
    assert Sizes({(1, 4, 8): 1.0}, {2: "no"}).barred() == "its trainer did not start on 2 GPUs (no)"
    assert Sizes({(1, 2, 8): 1.0, (1, 4, 8): 1.0}, {3: "no"}).most_allowed() == 2


def test_a_larger_batch_is_predicted_from_what_two_sizes_of_it_and_of_another_have_shown():
    def truth(gpus, batch):
        return 0.02 + 0.001 * batch / gpus

    rows = {(1, gpus, batch): truth(gpus, batch) for gpus, batch in ((1, 768), (2, 768), (2, 1536))}
    assert predicted(Sizes(rows), 1, 8, 1536) == pytest.approx(truth(8, 1536), rel=0.2)
