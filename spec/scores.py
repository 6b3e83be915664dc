"""What a call may say about the scores, and what an implementation claims of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

ScaleRange = Literal["positive", "any"]


@dataclass(frozen=True, slots=True)
class Scores:
    """What a call may say about the scores.

    scale: an explicit scale takes the place of the usual one (clause SCL-1): "positive" ones, or "any", zero and
        negative ones too; None if there is no such argument.

    Raises ValueError for an unknown word.

    >>> Scores(scale="positive").takes("scale"), Scores().takes("scale")
    (True, False)
    """

    scale: ScaleRange | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown word."""
        if self.scale is not None and self.scale not in get_args(ScaleRange):
            words = ", ".join(map(repr, get_args(ScaleRange)))
            raise ValueError(f"Scores.scale must be one of {words} or None, but is {self.scale!r}")

    def takes(self, option: str) -> bool:
        """Return whether a field of `Options` may be given."""
        return getattr(self, option) is not None


@dataclass(frozen=True, slots=True)
class Options:
    """What a call says about the scores, beside masks; each field is an argument that it has or leaves out.

    scale: what the scores are multiplied by; None for the usual scale, which is not passed then.

    >>> Options(scale=0.5).given, Options().given
    ({'scale': 0.5}, {})
    """

    scale: float | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of the call, by name."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in pairs if value is not None}
