"""What a property raises when an implementation departs from the contract."""


class Violation(Exception):
    """A departure from a clause.

    message: what was seen and what should have been. check: the lines of Python that show it, in a script that has
    repeated the trial's calls; none where the calls themselves show it by raising.
    """

    def __init__(self, message: str, check: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message, self.check = message, check


class Refusal(Violation):
    """The implementation raised `error` where the contract asks for a result."""

    def __init__(self, message: str, error: BaseException) -> None:
        super().__init__(message)
        self.error = error
