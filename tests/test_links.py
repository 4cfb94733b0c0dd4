"""Links between texts, and references from code to the documents, lead somewhere.

A reference names the heading: `docs/spec/wire-protocol.md#work`, or `wire-protocol.md#work` where
the line is short, and more headings of the same document behind it: `#work, #result`. Numbers of
sections change when a document is edited, so none may stand in the code or in other documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPECS = {path.name: path for path in (ROOT / "docs" / "spec").glob("*.md")}
TEXTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/*/*.md", "interop/**/*.md")
    for path in ROOT.glob(pattern)
)
CODE = sorted(
    path
    for folder in ("ds4py", "interop", "tests", "tools")
    for path in (ROOT / folder).rglob("*.py")
    if "golden" not in path.parts and path != Path(__file__)
)
REFERENCE = re.compile(r"\b([\w/-]+\.md)((?:#[\w-]+(?:(?:,| and|,? or) (?=#\w))?)+)")
NUMBERED = re.compile(
    r"(?:\b(?:[Ss]pec|[Ss]ections?|table)|\.md\)?,?) \d+(?:\.\d+)*\b|\b[Aa]ppendix [A-E]\b|\(15, Q"
)
QUOTED = {"docs/server-checklist.md", "interop/CONFORMANCE.md"}
"""Tables whose rows are the specification's own statements, with the words that tests give."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def anchors(path: Path) -> set[str]:
    """Names of a text's headings, as GitHub makes them, and those that the text gives itself."""
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([\w-]+)"></a>', text))


def prose(text: str) -> str:
    """A text without breaks of lines, and without the marks of comments."""
    return " ".join(re.sub(r"^\s*#(?!\w)", "", line).strip() for line in text.splitlines())


def dead(text: str) -> Iterator[str]:
    """References of a text that lead nowhere."""
    for document, tail in REFERENCE.findall(prose(text)):
        target = SPECS.get(document) or ROOT / document
        for anchor in re.findall(r"#([\w-]+)", tail):
            if not target.is_file() or anchor not in anchors(target):
                yield f"{document}#{anchor}"


@pytest.mark.parametrize("path", [p for p in TEXTS if p.parent.name != "spec"], ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("path", CODE, ids=name)
def test_references_in_code_name_headings_that_exist(path: Path) -> None:
    text = re.sub(r"\]\([^)]*\)", "]", path.read_text(encoding="utf-8"))
    assert list(dead(text)) == []
    assert NUMBERED.findall(prose(text)) == []


@pytest.mark.parametrize("path", [p for p in TEXTS if p.parent.name != "spec"], ids=name)
def test_texts_name_headings_and_no_numbers_of_sections(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert list(dead(re.sub(r"\]\([^)]*\)", "", text))) == []
    if name(path) not in QUOTED:
        assert NUMBERED.findall(re.sub(r"\]\([^)]*\.md[^)]*\)", "].md", text)) == []


@pytest.mark.parametrize("path", SPECS.values(), ids=name)
def test_a_name_stands_once_in_its_document(path: Path) -> None:
    given = re.findall(r'<a id="([\w-]+)"></a>', path.read_text(encoding="utf-8"))
    assert len(given) == len(set(given)) > 0


def test_the_rules_find_what_they_forbid() -> None:
    text = "as in wire-protocol.md#work,\n    # #result and #no-such-thing; docs/no.md#work"
    assert list(dead(text)) == ["wire-protocol.md#no-such-thing", "docs/no.md#work"]
    for wrong in ("(spec 8.2)", "docs/spec/kv-payload.md 2", "in section\n4", "see appendix B"):
        assert NUMBERED.search(prose(wrong)), wrong
