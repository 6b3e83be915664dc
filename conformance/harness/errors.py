"""What a property raises when an implementation departs from the contract, or when a case says nothing of it."""

CALL = "the call"


class Violation(Exception):
    """A departure from a clause.

    message: what was seen and what should have been. check: the lines of Python that show it, in a script that has
    repeated the trial's calls; none where the calls themselves show it by raising. family: of the clauses that it
    departs from, where those are not the clause under test: it then tells nothing about that one.
    """

    def __init__(self, message: str, check: tuple[str, ...] = (), family: str | None = None) -> None:
        super().__init__(message)
        self.message, self.check, self.family = message, check, family


class CallRaised(Violation):
    """The implementation raised `error` in `what`, where the contract asks for a result."""

    def __init__(self, message: str, error: BaseException, what: str = "") -> None:
        super().__init__(message)
        self.error, self.what = error, what


class Discard(Exception):
    """A case that says nothing of the clause, for the reason given; it is not counted."""
