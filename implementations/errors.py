"""The errors of finding, loading and adapting implementations."""


class ImplementationError(ValueError):
    """An implementation cannot be found, loaded or adapted; the message says what was expected and what to do."""


class UnavailableError(ImplementationError):
    """An implementation lacks something optional, such as a package or a device; raised while it is imported.

    `mha list` shows the message, and a run of all implementations leaves it out without failing.
    """
