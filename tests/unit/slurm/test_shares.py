"""Weights by Slurm's shares, from what sacctmgr prints."""

from __future__ import annotations

import pytest

from polluxd.errors import SlurmGarbled
from polluxd.slurm.shares import read_shares

TREE = """\
root|||1
root||root|1
science|root||3
vision|science||2
vision||ada|1
vision||bob|3
nlp|science||1
nlp||ada|1
nlp||cy|parent
"""


def shares(text: str):
    return read_shares(lambda *_: text, "dev")


def test_an_account_weighs_its_part_of_the_tree():
    found = shares(TREE)
    # Of root's shares its own user has 1 of 4, and science 3; of these vision has 2 of 3, and nlp 1.
    assert found.accounts == pytest.approx({"root": 0.75, "vision": 1.5, "nlp": 0.75})


def test_a_user_weighs_the_share_within_the_account():
    found = shares(TREE)
    assert found.users == {"root": 1.0, "bob": 1.5}
    assert found.differing == {"ada"}, "0.5 in vision, 1 in nlp"


def test_no_associations_give_no_weights():
    assert not shares("").accounts


@pytest.mark.parametrize("text", ["vision|root|1\n", "vision||ada|much\n"])
def test_another_text_is_refused(text: str):
    with pytest.raises(SlurmGarbled, match="expected account"):
        shares(text)


def test_accounts_in_a_circle_are_refused():
    with pytest.raises(SlurmGarbled, match="tree"):
        shares("a|b||1\nb|a||1\na||ada|1\n")
