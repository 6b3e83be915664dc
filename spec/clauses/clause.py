"""What a clause of the contract is."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["MUST", "SHOULD", "MAY"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """One requirement on an implementation of multi-head attention.

    id: family and number, such as "MSK-1"; never renumbered.
    level: RFC 2119's word: MUST fails a run, SHOULD is reported apart, MAY needs a claimed capability.
    title: the requirement in a few words.
    statement: the requirement in full. B, H, L, S, D and d_k = D / H are the sizes of the batch, heads, queries, keys,
        model and head; "within the bound" always means the derived bound on rounding errors.
    why: what goes wrong for whoever uses attention, in a model, in training or in production, when it is broken.
    source: where the requirement comes from.
    differs: where known implementations differ here; empty where no difference is known.
    violation: an example: one implementation that departs from it, and what is then seen. Code is in backticks.
    deferred: why no property tests it yet, where that is deliberate; empty for nearly all.
    """

    id: str
    level: Level
    title: str
    statement: str
    why: str
    source: str
    differs: str
    violation: str
    deferred: str = ""

    @property
    def family(self) -> str:
        """The letters before the hyphen of the id, such as "MSK"."""
        return self.id.partition("-")[0]


@dataclass(frozen=True, slots=True)
class Family:
    """The clauses on one subject, whose ids begin with the same letters.

    title: its name. about: what its clauses say, in a sentence.
    """

    title: str
    about: str
