"""The sizes and options of one multi-head attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes and options of one attention (Vaswani et al. 2017, section 3.2.2).

    Building a `Config` does not validate it, so that the CFG clauses can try invalid ones; see
    `validate`.

    d_model: width of the query, of the output, and of key and value unless `kdim` or `vdim` is
        given.
    n_heads: number of query heads.
    n_kv_heads: number of key/value heads; None means `n_heads`.
    kdim, vdim: widths of key and value; None means `d_model`.
    bias: whether the four projections have a bias vector, or which of them have one, such as "qvo".
    dropout: probability, in [0, 1], of dropping a weight in training.
    bias_kv: a learned key and value, `Weights.extra_k` and `extra_v`, are appended to those of the
        input, visible to every query.
    zero_key: a key and value of zeros are appended after those, visible to every query.
    length_first: tensors are (length, batch, width) instead of (batch, length, width).
    d_head: width of one head; None means d_model / n_heads.
    output_dropout: probability of dropping an element of the output, where it may be another one
        (`Claims.dropout` is "each"); None for the same.
    projected: whether there are projections. Without them, as in a kernel, query, key and value are
        their heads side by side, (B, length, heads * d_k), values (B, length, heads * d_v), and the
        output is the contexts, side by side.
    norm_weights: what the weights of a norm of queries and keys are for: the columns of one "head",
        those of all heads ("width"), or "" if there are none; see `mha.spec.QkNorm`.
    d_value: width of the values of one head; None means that of its queries and keys.

    >>> config = Config(d_model=12, n_heads=3, n_kv_heads=1, kdim=7)
    >>> config.head_dim, config.kv_heads, config.key_width, config.value_width
    (4, 1, 7, 12)
    """

    d_model: int
    n_heads: int
    n_kv_heads: int | None = None
    kdim: int | None = None
    vdim: int | None = None
    bias: bool | str = True
    dropout: float = 0.0
    bias_kv: bool = False
    zero_key: bool = False
    length_first: bool = False
    d_head: int | None = None
    output_dropout: float | None = None
    projected: bool = True
    d_value: int | None = None
    norm_weights: str = ""

    @property
    def drops(self) -> bool:
        """Whether anything may be dropped in training."""
        return max(self.dropout, self.dropout_of_output) > 0

    @property
    def dropout_of_output(self) -> float:
        """The probability of dropping an element of the output, for what drops any."""
        return _given(self.output_dropout, self.dropout)

    @property
    def head_dim(self) -> int:
        """Width of one head, d_k; meaningful only for a valid configuration."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def inner_width(self) -> int:
        """Width of all heads side by side, n_heads * d_k: `d_model`, unless `d_head` is given."""
        return self.d_model if self.d_head is None else self.n_heads * self.d_head

    @property
    def value_dim(self) -> int:
        """Width of the values of one head, d_v, and of its context: `d_value` or `head_dim`."""
        return _given(self.d_value, self.head_dim)

    @property
    def context_width(self) -> int:
        """Width of all contexts side by side, n_heads * d_v."""
        return self.inner_width if self.d_value is None else self.n_heads * self.d_value

    @property
    def output_width(self) -> int:
        """Width of the output: `d_model`, or that of the contexts if there are no projections."""
        return self.d_model if self.projected else self.context_width

    def width_of(self, role: str) -> int:
        """Return the width of one head of queries, keys or values ("q", "k", "v")."""
        return self.value_dim if role == "v" else self.head_dim

    def norm_width(self, role: str) -> int | None:
        """Return how many weights a norm of queries or keys ("q", "k") has, or None."""
        if not self.norm_weights or role not in "qk":
            return None
        if self.n_heads == 0:  # an invalid configuration, which gets weights too
            return 0
        width = max(self.head_dim, 0)
        if self.norm_weights == "head":
            return width
        return width * max(self.n_heads if role == "q" else self.kv_heads, 0)

    def has_bias(self, role: str) -> bool:
        """Return whether a projection ("q", "k", "v" or "o") has a bias."""
        return role in self.bias if isinstance(self.bias, str) else self.bias

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads: `n_kv_heads`, or `n_heads` if that is None."""
        return _given(self.n_kv_heads, self.n_heads)

    @property
    def key_width(self) -> int:
        """Width of the key input: `kdim`, or `d_model` if that is None."""
        return _given(self.kdim, self.d_model)

    @property
    def value_width(self) -> int:
        """Width of the value input: `vdim`, or `d_model` if that is None."""
        return _given(self.vdim, self.d_model)

    def of_heads(self) -> Config:
        """Return the configuration of attention to the same heads without projections.

        >>> Config(d_model=12, n_heads=3, n_kv_heads=1).of_heads().key_width
        4
        """
        widths = {"kdim": self.kv_heads * self.head_dim, "vdim": self.kv_heads * self.value_dim}
        sizes = {"d_model": self.inner_width, "d_head": None, **widths}
        return replace(self, projected=False, norm_weights="", **sizes)  # type: ignore[arg-type]  # the types of these fields

    @property
    def extra_keys(self) -> int:
        """Number of keys appended to those of the input: 0, 1 or 2."""
        return int(self.bias_kv) + int(self.zero_key)

    def validate(self) -> None:
        """Raise ValueError if this configuration is invalid (clauses CFG-1 to CFG-6).

        >>> Config(d_model=10, n_heads=3).validate()
        Traceback (most recent call last):
        ValueError: d_model (10) must be divisible by n_heads (3)
        """
        sizes = {
            "d_model": self.d_model,
            "n_heads": self.n_heads,
            "n_kv_heads": self.kv_heads,
            "kdim": self.key_width,
            "vdim": self.value_width,
            "d_head": _given(self.d_head, 1),
            "d_value": _given(self.d_value, 1),
        }
        for name, size in sizes.items():
            if size <= 0:
                raise ValueError(f"{name} must be positive, but is {size}")
        if self.d_head is None and self.d_model % self.n_heads:
            raise ValueError(
                f"d_model ({self.d_model}) must be divisible by n_heads ({self.n_heads})"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"n_heads ({self.n_heads}) must be divisible by n_kv_heads ({self.kv_heads})"
            )
        for name, probability in (
            ("dropout", self.dropout),
            ("output_dropout", self.dropout_of_output),
        ):
            if not 0.0 <= probability <= 1.0:
                raise ValueError(f"{name} must be in [0, 1], but is {probability}")


def _given(number: N | None, default: N) -> N:
    """Return a number, or its default where none is given."""
    return default if number is None else number
