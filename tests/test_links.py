"""Links in documents lead somewhere: to a file of this project, and to a heading that is there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
PAGES = sorted(PROJECT.glob("*.md")) + sorted(
    path
    for room in ("docs", "bootstrap", "research", "benchmarks", "simulator", "internet", "examples")
    for path in (PROJECT / room).rglob("*.md")
)
LINK = re.compile(r"\]\(([^)\s]+)\)", re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub and most site builders make them."""
    found: set[str] = set()
    for heading in HEADING.findall(without_code(page.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = sum(other == anchor or re.fullmatch(rf"{re.escape(anchor)}-\d+", other) is not None for other in found)
        found.add(f"{anchor}-{number}" if anchor in found else anchor)
    return frozenset(found)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for page in PAGES:
        for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            place = (page.parent / target).resolve() if target else page
            is_there = place.exists() and (not anchor or place.suffix != ".md" or anchor in anchors(place))
            if not is_there:
                broken.append(f"{page.relative_to(PROJECT)}: {link}")
    assert broken == []
