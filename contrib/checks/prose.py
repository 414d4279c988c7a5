"""Reject banned words and docstring summaries that are too long.

    python contrib/checks/prose.py [PATH ...]

Python files are read by their docstrings, comments and strings; Markdown without its code blocks; Lua, SQL and manual
pages as a whole. `words.txt` holds the words.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = Path(__file__).with_name("words.txt")
SUFFIXES = (".py", ".md", ".lua", ".sql", ".1", ".5", ".7", ".8")
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Violation:
    """One place that the check rejects."""

    path: str
    line: int
    message: str


def banned(listing: str) -> list[tuple[re.Pattern[str], str]]:
    """Read a list of words: pattern and advice of each line."""
    found = []
    for line in listing.splitlines():
        if line.strip() and not line.startswith("#"):
            phrase, _, advice = line.partition("  ")
            pattern = r"\s+".join(map(re.escape, phrase.split()))
            found.append((re.compile(rf"\b{pattern}\b", re.IGNORECASE), advice.strip()))
    return found


def check(path: str, text: str, words: list[tuple[re.Pattern[str], str]]) -> list[Violation]:
    """Return the violations in the text of one file."""
    # Most files have none of the words anywhere, and need not be parsed. A comment's next line begins with a hash.
    flat = " ".join(text.replace("#", " ").split())
    words = [word for word in words if word[0].search(flat)]
    found: list[Violation] = []
    if not words:
        return found
    for line, prose in _python_prose(text) if path.endswith(".py") else [(1, _markdown(path, text))]:
        for pattern, advice in words:
            for match in pattern.finditer(prose):
                where = line + prose.count("\n", 0, match.start())
                phrase = " ".join(match[0].split())
                found.append(Violation(path, where, f'"{phrase}" is banned; write: {advice}'))
    return sorted(found, key=lambda violation: violation.line)


def _python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield all strings and comments; comments in a row are one text."""
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield begin, "\n".join(block)
                block = []
            if not block:
                begin = token.start[0]
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    if block:
        yield begin, "\n".join(block)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _markdown(path: str, text: str) -> str:
    """Blank the code blocks of a Markdown page, so that line numbers stay."""
    return FENCE.sub(lambda match: "\n" * match[0].count("\n"), text) if path.endswith(".md") else text


def files(given: list[str]) -> list[str]:
    """Return the committed and the new files that hold prose."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "--", *given]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in sorted({*listed}) if name.endswith(SUFFIXES) and (ROOT / name).is_file()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the English of the repository.")
    parser.add_argument("paths", nargs="*", help="files and folders; everything by default")
    arguments = parser.parse_args()

    words = banned(WORDS.read_text())
    found = [v for name in files(arguments.paths) for v in check(name, (ROOT / name).read_text(), words)]
    for violation in found:
        print(f"{violation.path}:{violation.line}: {violation.message}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
