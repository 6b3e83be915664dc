"""What `judge_output` says of one output: data, and a text that says what is wrong."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Element:
    """One number of a result.

    index: its place, along the axes of the contract: (b, h, l, d) of a context, (b, h, l) of a
        log-sum-exp.
    got, expected: as returned, and as computed in float64.
    bound: how far rounding may move it.
    """

    index: tuple[int, ...]
    got: float
    expected: float
    bound: float

    def __str__(self) -> str:
        place = ", ".join(map(str, self.index))
        got, expected = _until_they_differ(self.got, self.expected)
        return f"[{place}] is {got}, should be {expected} (bound on rounding: {self.bound:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """How one result compares with the oracle, element by element.

    name: "context" or "lse".
    elements: how many were compared.
    unknown: of how many nothing is known, as where a step may overflow, or a row is undefined.
    wrong: how many are outside their bound.
    nans: how many are NaN and should not be.
    margin: the largest error/bound of what is inside.
    first, worst, first_nan: of the wrong ones, the first, the one that is farthest outside its
        bound, and the first NaN.
    """

    name: str
    elements: int = 0
    unknown: int = 0
    wrong: int = 0
    nans: int = 0
    margin: float = 0.0
    first: Element | None = None
    worst: Element | None = None
    first_nan: Element | None = None

    def __str__(self) -> str:
        if not self.wrong:
            text = f"{self.name}: all {self.elements} elements are within the bound"
            return f"{text}, {self.unknown} of which is unknown" if self.unknown else text
        share = 100 * self.wrong / max(1, self.elements)
        text = f"{self.name}: {self.wrong} of {self.elements} elements ({share:.3g}%) are wrong"
        if self.first_nan is not None:
            text += f"; {self.nans} are NaN, the first one is {self.name}{self.first_nan}"
        if self.first is not None and self.first != self.first_nan:
            text += f"; first: {self.name}{self.first}"
        if self.worst is not None and self.worst != self.first:
            text += f"; worst: {self.name}{self.worst}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputVerdict:
    """Whether an output is right, and what is wrong with it.

    refused: what is no result at all, such as a wrong shape; "" otherwise.
    results: the comparison of the context and, if there is one, of the log-sum-exp.
    directed: in half precision, the small defect that explains the errors and that rounding does
        not, in words; "" without one.
    cause: the known defect whose result it is, in words; "" where none is found.

    >>> verdict = OutputVerdict(results=(Compared(name="context", elements=6),))
    >>> verdict.ok, verdict.text
    (True, 'right; context: all 6 elements are within the bound')
    """

    refused: str = ""
    results: tuple[Compared, ...] = ()
    directed: str = ""
    cause: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        wrong = any(result.wrong for result in self.results)
        return not (self.refused or wrong or self.directed)

    @property
    def judged(self) -> bool:
        """Whether anything is known of the right result."""
        return any(result.unknown < result.elements for result in self.results)

    @property
    def share_wrong(self) -> float:
        """The share of all elements that are outside their bound; 1 for what is no result."""
        if self.refused:
            return 1.0
        elements = sum(result.elements for result in self.results)
        return sum(result.wrong for result in self.results) / max(1, elements)

    @property
    def text(self) -> str:
        """What is wrong, in words, in one line."""
        parts = [self.refused, self.cause or self.directed]
        for result in self.results:
            if result.wrong or self.ok:
                parts.append(str(result))
        said = "; ".join(part for part in parts if part)
        return f"right; {said}" if self.ok else f"wrong: {said}"

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> str:
        """Return it as one line of JSON; numbers that JSON has not are texts."""
        data = {"ok": self.ok, "text": self.text, **asdict(self)}
        return json.dumps(_plain(data), allow_nan=False)


def _plain(data: object) -> object:
    """Return data in which each float that JSON lacks is a text."""
    if isinstance(data, dict):
        return {name: _plain(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    if isinstance(data, float) and (data != data or abs(data) == float("inf")):
        return repr(data)
    return data


def _until_they_differ(x: float, y: float) -> tuple[str, str]:
    """Return two numbers with four digits, or as many as tell them apart."""
    for digits in range(4, 18):
        one, other = f"{x:.{digits}g}", f"{y:.{digits}g}"
        if one != other:
            return one, other
    return repr(x), repr(y)
