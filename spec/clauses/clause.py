"""A clause of the contract, and a family of clauses."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["MUST", "SHOULD", "MAY"]
Kind = Literal["answers", "conduct", "refusals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """One requirement on an implementation of multi-head attention.

    All texts are plain English, with code in backticks. They use B, H, L, S and D for the numbers
    of batch items, heads, queries and keys and for the model width, and d_k for the head width, D /
    H unless `Config.d_head` is given. "Within the bound" always means the derived bound on rounding
    errors, never a chosen tolerance.

    id: family and number, such as "MSK-1"; a clause is never renumbered.
    level: as in RFC 2119. A violated MUST fails a run; a violated SHOULD is reported, and fails a
        run only if it is strict; MAY applies only to implementations that claim the capability.
    title: the requirement in a few words.
    statement: the requirement in full.
    why: what goes wrong for users, in a model, in training or in production, if the clause is
        violated.
    source: where the requirement comes from: an equation, documentation, or known bugs.
    differs: how known libraries differ here; empty if no difference is known.
    violation: an example of code that violates the clause, and its visible effect.
    fix: what usually mends a violation.
    kind: "answers" if a violation means that a valid call gives an incorrect result, or none;
        "refusals" if it means that invalid input is accepted; "conduct" if results are correct by
        themselves, but a call has side effects, or differs when it is repeated, compiled or
        transformed.
    since: the version of the contract that it came with.
    accepts: of a clause of kind "refusals", the invalid input that a violation accepts, as in
        "masks of a wrong shape".
    general: whether whole results are compared with the oracle's, so that almost any defect
        violates the clause, and its failure names none.

    >>> from mha.spec import CLAUSES
    >>> clause = CLAUSES["MSK-4"]
    >>> clause.level, clause.title
    ('MUST', 'An all-True mask equals no mask')
    >>> clause.family, clause.kind
    ('MSK', 'answers')
    """

    id: str
    level: Level
    title: str
    statement: str
    why: str
    source: str
    differs: str
    violation: str
    fix: str
    kind: Kind = "answers"
    since: str = "0.1"
    accepts: str = ""
    general: bool = False

    @property
    def family(self) -> str:
        """The letters of the id, before the hyphen, such as "MSK"."""
        return self.id.partition("-")[0]


@dataclass(frozen=True, slots=True)
class Family:
    """The clauses on one subject, whose ids start with the same letters.

    title: the name of the subject. about: what its clauses cover, in one sentence.

    >>> from mha.spec.clauses import FAMILIES
    >>> FAMILIES["MSK"].title
    'Masks'
    """

    title: str
    about: str
