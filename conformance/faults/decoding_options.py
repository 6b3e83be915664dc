"""Faults that INC must catch: decoding with other options than a call has."""

from __future__ import annotations

from typing import Any

from mha.conformance.faults.base import Complete
from mha.conformance.faults.fault import fault
from mha.conformance.harness.known_bad.options import moved
from mha.spec import Options


class _OtherOptions(Complete):
    """A cache of decoding takes other options than a call does."""

    def other(self, options: Options) -> Options:
        """Return what decoding has of the options of calls."""
        raise NotImplementedError

    def decoder_with(self, options: Options) -> Any:
        return super().decoder_with(self.other(options))


@fault(
    "INC-1",
    caught_by="decoding_goes_with_options",
    script_shows=False,
    trigger="decoding with a window",
    source="https://github.com/mistralai/mistral-inference/issues/60",
)
class WindowOfOneMoreDecoded(_OtherOptions):
    """Decoding keeps one key more than the window has."""

    def other(self, options: Options) -> Options:
        if options.window is None:
            return options
        return options.change(window=moved(options.window, 1, 0))


@fault(
    "INC-1",
    caught_by="decoding_goes_with_options",
    script_shows=False,
    trigger="decoding with a cap",
)
class UncappedDecoding(_OtherOptions):
    """The path of decoding knows no cap."""

    def other(self, options: Options) -> Options:
        return options.change(softcap=None)
