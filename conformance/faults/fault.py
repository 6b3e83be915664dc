"""What a fault of the gallery is."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from mha.spec import Claims


class Fault(NamedTuple):
    """A faulty class, the section of the gallery that it is from, and the clause that names its defect.

    by: the property that must catch it, where the clause has several. claims: those of its base unless given.
    shown: whether a script can show it alone; what the judge measures by other means than calls, it cannot.
    """

    cls: type[nn.Module]
    section: str
    clause: str
    dtype: str = "float32"
    by: str = ""
    claims: Claims | None = None
    shown: bool = True
