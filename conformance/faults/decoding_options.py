"""Faults that INC must catch: decoding with other options than a call has."""

from __future__ import annotations

from typing import Any

from mha.conformance.faults.base import Complete
from mha.conformance.faults.fault import fault
from mha.conformance.harness.known_bad.options import moved
from mha.spec import Options


@fault(
    "INC-1",
    caught_by="decoding_goes_with_options",
    script_shows=False,
    trigger="decoding with a window",
)
class WindowOfOneMoreDecoded(Complete):
    """Decoding keeps one key more than the window has."""

    def decoder_with(self, options: Options) -> Any:
        if options.window is not None:
            options = options.change(window=moved(options.window, 1, 0))
        return super().decoder_with(options)


@fault(
    "INC-1",
    caught_by="decoding_goes_with_options",
    script_shows=False,
    trigger="decoding with a cap",
)
class UncappedDecoding(Complete):
    """The path of decoding knows no cap."""

    def decoder_with(self, options: Options) -> Any:
        return super().decoder_with(options.change(softcap=None))
