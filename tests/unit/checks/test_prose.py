"""The prose check, on short texts."""

import pytest

from contrib.checks.prose import WORDS, banned, check, files

WORD = "a" + "new"  # the word itself would be a violation here
LISTED = banned(f"# a comment\n{WORD}   again\nlast resort   exception\n")


@pytest.mark.parametrize(
    ("path", "text", "lines"),
    [
        ("a.py", f'"""Begin {WORD}."""\n', [1]),
        ("a.py", f"x = 1\n# begins {WORD}\n", [2]),
        ("a.py", f'x = (\n    f"begins {WORD.upper()} {{1}}"\n)\n', [2]),
        ("a.py", "# a last\n# resort\n# lasts\n", [1]),
        ("a.py", f"{WORD} = 1  # a name is no prose\n", []),
        ("a.py", f"renewed = '{WORD}ed'\n", []),
        ("a.md", f"Begin {WORD}.\n", [1]),
        ("a.md", f"Text.\n\n```\nrun {WORD}\n```\n\nBegin {WORD}.\n", [7]),
        ("a.sql", f"select 1;\n-- begins {WORD}\n", [2]),
        ("a.lua", f"-- begins {WORD}\n", [1]),
        ("a.8", f"The last\nresort, {WORD}.\n", [1, 2]),
    ],
)
def test_banned_words_are_found_where_prose_stands(path: str, text: str, lines: list[int]) -> None:
    assert [violation.line for violation in check(path, text, LISTED)] == lines


def test_the_committed_list_names_a_replacement_for_each_word() -> None:
    listed = banned(WORDS.read_text())
    assert len(listed) >= 14
    assert all(advice for _, advice in listed)


def test_pages_and_hooks_are_among_the_files_checked() -> None:
    found = files([])
    assert {"README.md", "agent/pollux/goodput.py", "contrib/man/polluxd.8"} <= {*found}
    assert any(name.endswith(".lua") for name in found)
    assert any(name.endswith(".sql") for name in found)
