"""What packages are built of is fetched by hash, in the versions that the tests have."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "contrib" / "packaging"


def pins(path: Path) -> dict[str, str]:
    found = [Requirement(line) for line in re.findall(r"(?m)^\w[^\\\n#]*", path.read_text())]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in found}


def test_each_requirement_has_the_tested_version_and_a_hash() -> None:
    tested = pins(ROOT / "constraints.txt")
    for name in ("hashes.txt", "hashes-build.txt"):
        for entry in re.split(r"\n(?=\w)", (FOLDER / name).read_text())[1:]:
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
        pinned = pins(FOLDER / name)
        assert {each: pinned[each] for each in pinned.keys() & tested.keys()} == {
            each: tested[each] for each in pinned.keys() & tested.keys()
        }, "run contrib/packaging/hashes.sh"


def test_each_dependency_has_a_hash() -> None:
    hashed = pins(FOLDER / "hashes.txt")
    for path in ("pyproject.toml", "agent/pyproject.toml"):
        needed = tomllib.loads((ROOT / path).read_text())["project"]["dependencies"]
        missing = {canonicalize_name(Requirement(each).name) for each in needed} - hashed.keys()
        assert missing <= {"pollux-agent"}, "run contrib/packaging/hashes.sh"


def test_packages_fetch_nothing_without_a_hash() -> None:
    script = (FOLDER / "lay_out.sh").read_text().replace("\\\n", " ")
    fetching = [each for each in re.findall(r"(?m)^.*/pip\" .*(?:install|wheel) .*$", script)]
    assert len(fetching) == 4
    for each in fetching:
        assert "--require-hashes" in each or "--no-deps" in each, each
        assert "--no-index" in each or "--no-build-isolation" in each or "--only-binary :all:" in each, each
