"""What a benchmark's own data say about a call of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mha.conformance.embedded.output import judge_output
from mha.conformance.embedded.verdict import OutputVerdict
from mha.spec.claims import Claims
from mha.spec.scores import Options


@dataclass(frozen=True, eq=False)
class Reading:
    """One call of attention, read from a benchmark's data; the fields are as in `judge_output`.

    Keys of a paged cache are gathered by whoever reads them.
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    options: Options | Mapping[str, Any] = field(default_factory=Options)
    layout: str = "b h l d"
    heads: int | None = None
    valid: Tensor | None = None

    def judge(self, output: object, claims: Claims) -> OutputVerdict:
        """Return the verdict on an output."""
        return judge_output(
            self.inputs,
            output,
            self.options,
            claims=claims,
            layout=self.layout,
            heads=self.heads,
            valid=self.valid,
        )
