"""A text that tries to run scripts, and what a page is made of."""

from __future__ import annotations

from html.parser import HTMLParser

HOSTILE = '</title></svg><script>alert(1)</script><img src=x onerror="alert(2)">\x1b[2J\x00\u202e\ud800"\'{{ 7 * 7 }}'


class Elements(HTMLParser):
    """Names of the elements, and attributes that would run or load things."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.active: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.active += [
            name for name, _ in attrs if name.startswith("on") or name in ("src", "href", "srcdoc")
        ]
