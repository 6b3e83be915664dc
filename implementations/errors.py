"""The one error of finding, loading and adapting implementations."""


class ImplementationError(ValueError):
    """An implementation that cannot be found, loaded or adapted; the message says what was expected and what to do."""
