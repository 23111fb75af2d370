"""What every view's HTML must be: balanced, escaped, small, without a style sheet, with no colour of text; and what its tables hold."""
from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"br", "wbr", "img", "input", "hr", "meta"}
FORBIDDEN = ("<style", "<svg", "onclick", "javascript:", "http:", "https:", "var(")
LIMIT = 300_000


class Parsed(HTMLParser):
    """The tags that are open, and tables as rows of (tag, attributes, text)."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.rows: list[list[tuple[str, dict, str]]] = []
        self.tags: list[tuple[str, dict]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append((tag, dict(attrs), ""))
        if tag == "br":
            self.handle_data(" ")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            tag, attrs, text = self.rows[-1][-1]
            self.rows[-1][-1] = (tag, attrs, text + data)


def parsed(html: str) -> Parsed:
    """Parse a view; fail where it breaks a rule."""
    found = Parsed()
    found.feed(html)
    found.close()
    assert not found.open, f"never closed: {found.open}"
    bare = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert not [word for word in FORBIDDEN if word in bare]
    for tag, attrs in found.tags:
        assert not re.search(r"(^|[;\s])color\s*:", attrs.get("style") or ""), f"{tag} fixes a colour of text"
        assert tag != "th" or attrs.get("scope") in ("col", "row") or not attrs.get("scope")
    assert len(html) < LIMIT
    return found
