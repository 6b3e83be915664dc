"""The modules whose names are watched, and the names that may change all the same."""

from __future__ import annotations

OWN = "mha"
PACKAGES = (OWN, "_pytest", "pytest")
# What is judged itself, and may keep what it likes.
JUDGED = "mha.conformance.faults"
MODULES = (
    *("builtins", "contextlib", "copy", "dataclasses", "functools", "gc", "hypothesis"),
    *("hypothesis.control", "hypothesis.core", "hypothesis.internal.conjecture.engine"),
    *("itertools", "json", "math", "numpy", "operator", "os", "random", "signal", "sys", "time"),
    *("traceback", "warnings"),
)
# What Python, its debuggers, and what records warnings replace by themselves.
UNWATCHED = {
    "builtins": {"_", "input"},
    "sys": {"breakpointhook", "displayhook", "excepthook", "unraisablehook"},
    "warnings": {
        *("formatwarning", "showwarning", "_showwarning_orig"),
        *("_showwarnmsg", "_showwarnmsg_impl"),
    },
}
# Names that Python adds to a class when it is first used.
ADDED = {
    *("__annotations__", "__annotations_cache__", "__slotnames__"),
    "__non_callable_proto_members__",
}
UNREAD = {
    *("__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl", "__module__"),
    *ADDED,
}
