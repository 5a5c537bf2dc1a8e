"""What a document claims, numbered, in words of our own; and what holds each claim.

A test holds a claim that its marker names: `@pytest.mark.claim("eager_tf.07")`. It must
fail when the claim is broken. `coverage` joins the two sides.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

_LINE = re.compile(r"(\d\d)  (.+)")


@dataclasses.dataclass(frozen=True)
class Claim:
    """One thing that a document says.

    Attributes:
        id: "document.number", as markers name it.
        words: what it says, in our own words.
        waiting: why no test holds it yet; empty where one must.
    """

    id: str
    words: str
    waiting: str = ""


def read_claims(
    document: str, text: str, waiting: Mapping[str, str] | None = None
) -> tuple[Claim, ...]:
    """Return the claims of a text with one claim a paragraph: `07  words`.

    Args:
        document: the first part of every id.
        text: two digits, two spaces, words; words go on in lines that are indented.
        waiting: reasons by number, for claims that are not built yet.

    Raises:
        ValueError: the numbers are not 01, 02, ... or a reason belongs to no claim.
    """
    paragraphs = re.sub(r"\n +", " ", text.strip()).splitlines()
    found = [_LINE.fullmatch(paragraph) for paragraph in paragraphs]
    pairs = [match.groups() for match in found if match is not None]
    numbers = [number for number, _ in pairs]
    expected = [f"{index + 1:02}" for index in range(len(paragraphs))]
    if numbers != expected:
        raise ValueError(f"Expected claims {expected} of {document}, found {numbers}.")
    reasons = dict(waiting or {})
    claims = tuple(
        Claim(f"{document}.{number}", words, reasons.pop(number, ""))
        for number, words in pairs
    )
    if reasons:
        raise ValueError(f"Expected reasons for claims of {document}, found {reasons}.")
    return claims


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        claim: what is said.
        tests: ids of the tests that hold it, without their parameters.
    """

    claim: Claim
    tests: tuple[str, ...]

    @property
    def problem(self) -> str:
        """What is wrong with the row; empty where nothing is."""
        if self.claim.waiting:
            return "has tests, though it waits" if self.tests else ""
        return "" if self.tests else "has no test"


def join(
    claims: Sequence[Claim], held: Mapping[str, Sequence[str]]
) -> tuple[list[Row], list[str]]:
    """Return a row for each claim, and everything that is wrong.

    Args:
        claims: of all documents.
        held: from the claims that markers name to the tests that bear them.
    """
    rows = [Row(claim, tuple(sorted(set(held.get(claim.id, ()))))) for claim in claims]
    problems = [f"{row.claim.id} {row.problem}" for row in rows if row.problem]
    known = {claim.id for claim in claims}
    for name in sorted(held.keys() - known):
        tests = ", ".join(sorted(set(held[name])))
        problems.append(f"{name} is no claim of any document, but of {tests}")
    return rows, problems
