"""The errors of finding, loading and adapting implementations."""


class ImplementationError(ValueError):
    """An implementation that cannot be found, loaded or adapted; the message says what was expected and what to do."""


class UnavailableError(ImplementationError):
    """Raised where an implementation is imported that lacks something optional, such as a package or a device.

    It is then listed with the message, and a run of all implementations goes on without it and without complaint.
    """
