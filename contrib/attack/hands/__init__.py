"""What users' own processes do: each module is a program of several functions.

python -m contrib.attack.hands.MODULE FUNCTION [WORD]...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints


def run(*functions: Callable[..., Any]) -> None:
    """Call the function that the first word names, with the others as its parameters' types; print what it returns.

    Words for lists and mappings are JSON; a text is printed as it is, all else as JSON.
    """
    function = next(each for each in functions if each.__name__ == sys.argv[1])
    kinds = [kind for name, kind in get_type_hints(function).items() if name != "return"]
    words = zip(kinds, sys.argv[2:], strict=False)
    found = function(
        *(kind(word) if kind in (str, int, float, Path) else json.loads(word) for kind, word in words)
    )
    if found is not None:
        print(found if isinstance(found, str) else json.dumps(found), flush=True)
