"""What a property raises: a violation of its clause, or why a case does not count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mha.implementations.discovery.errors import ImplementationError

if TYPE_CHECKING:
    from mha.conformance.cases.case import Case

# What a call of the attention is named in messages.
CALL = "the call"


class Violation(Exception):
    """An implementation violates a clause.

    message: what was expected, and what was returned.
    assertion: the lines of Python that fail in a script which has repeated the session's calls;
        empty where a call raises, which shows the violation by itself.
    family: of the clauses that are violated, where the clause under test is not one of them and can
        therefore not be judged.
    is_rounding: whether a number is off by no more than a few roundings of its dtype.
    """

    is_rounding = False

    def __init__(
        self, message: str, assertion: tuple[str, ...] = (), family: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.assertion, self.family = message, assertion, family

    @property
    def must_raise(self) -> bool:
        """Whether it is that the last step of the session raised nothing."""
        return any(line.startswith("raise AssertionError") for line in self.assertion)


class CallRaised(Violation):
    """The implementation raised `error` where the contract asks for a result.

    what: the step that raised it.
    """

    def __init__(self, message: str, error: BaseException, what: str = "") -> None:
        super().__init__(message)
        self.error, self.what = error, what


class AdapterError(Exception):
    """The adapter, and not the implementation, cannot do what a case asks for.

    message: one line, with what to declare.
    error: what the adapter raised.
    """

    def __init__(self, message: str, error: ImplementationError) -> None:
        super().__init__(message)
        self.message, self.error = message, error


class GpuLost(BaseException):
    """After a call, this process can no longer use its GPU.

    It is no `Exception`, so that nothing tries the case again.

    message: what the call raised.
    case: in which it did, once that is known.
    """

    case: Case | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Discard(Exception):
    """The case says nothing about the clause, for the reason given; it is not counted."""
