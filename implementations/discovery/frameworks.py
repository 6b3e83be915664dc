"""Modules of other frameworks than torch: how they are told apart, and what to judge instead."""

from __future__ import annotations

_EXCHANGE = (
    "wrap it in an object with name, claims (gradients=False) and build, whose attention exchanges"
    " tensors through torch.from_dlpack; judge that"
)
# How modules of other frameworks are declared, by the packages that define their base classes.
HOW_TO_WRAP = {
    "Keras": (
        "wrap it in a torch.nn.Module, on the torch backend, as"
        " mha.implementations.ecosystem.keras_mha does"
    ),
    "Flax": _EXCHANGE,
    "Haiku": _EXCHANGE,
    "Equinox": _EXCHANGE,
    "MLX": _EXCHANGE,
    "TensorFlow": _EXCHANGE,
}


def framework_of(value: object) -> str | None:
    """Return the framework other than torch that defines a class, or a base of it.

    >>> framework_of(dict)
    """
    packages = set()
    for base in getattr(value, "__mro__", ()):
        package, _, _ = base.__module__.partition(".")
        packages.add(package.removeprefix("tf_"))  # as in tf_keras
    for name in HOW_TO_WRAP:
        if name.lower() in packages:
            return name
    return None
