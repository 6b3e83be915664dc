"""Why a property is not judged on what an implementation claims."""

from __future__ import annotations

from dataclasses import dataclass

# What dtypes are counted under, where a clause is not for them.
OTHER_DTYPES = "other dtypes"


@dataclass(frozen=True, slots=True)
class NeedsClaim:
    """A claim is missing.

    field: of `Claims`; or several, with "|" between them, one of which will do.
    value: the one that is needed, if it is not the only other one.

    >>> reason = NeedsClaim("masks", '{"float"}')
    >>> str(reason), reason.topic
    ('needs the claim masks={"float"}', 'masks')
    """

    field: str
    value: str = ""

    @classmethod
    def of(cls, need: str) -> NeedsClaim:
        """Return the reason for a need, as a property has it: "field" or "field=value"."""
        field, _, value = need.partition("=")
        return cls(field, value)

    def __str__(self) -> str:
        fields = self.field.replace("|", " or ")
        return f"needs the claim {fields}{'=' if self.value else ''}{self.value}"

    @property
    def topic(self) -> str:
        """What reports count it under."""
        return self.field.partition(".")[0]


@dataclass(frozen=True, slots=True)
class OtherDtypes:
    """The property is for other dtypes.

    >>> str(OtherDtypes(("bfloat16", "float16")))
    'applies to bfloat16, float16 only'
    """

    dtypes: tuple[str, ...]
    topic: str = OTHER_DTYPES

    def __str__(self) -> str:
        return f"applies to {', '.join(self.dtypes)} only"


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """Any other reason, in words.

    topic: what reports count it under, or "" for the words themselves.
    """

    text: str
    topic: str = ""

    def __str__(self) -> str:
        return self.text


Reason = NeedsClaim | OtherDtypes | NotApplicable
