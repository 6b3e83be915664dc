"""The number of keys, and of queries, that a call may give for each item of a dense batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import Probe, is_close
from mha.spec import Options

Lengths = Literal["keys", "both"]
WORDS: dict[Lengths, str] = {
    "keys": "of the keys of each item, and places count from them",
    "both": "of the keys and the queries of each item, and places count from them",
}


def find_lengths(candidate: Candidate) -> Candidate:
    """Claim lengths of the items, if parameters have their names.

    Where they have another effect, or none, they are claimed as their names say, and fail then.
    """
    names = candidate.names_of("key_lengths")
    if not (candidate.explained and names) or candidate.declared.layout.startswith("t "):
        return candidate
    names_of_queries = candidate.names_of("query_lengths")
    choices: list[Lengths] = ["both", "keys"] if names_of_queries else ["keys"]
    for lengths in choices:
        tried = candidate.claiming(lengths=lengths)
        if all(_follows(tried, probe) for probe in tried.probes):
            return _noted(tried, lengths)
    for lengths in choices:
        tried = candidate.claiming(lengths=lengths)
        probe = tried.probes[0]
        if tried.call(probe.inputs, **_given(tried, probe).arguments) is not None:
            return _noted(tried, lengths, "assumed by its name: no reading gives what it does")
    return candidate


def _noted(candidate: Candidate, lengths: Lengths, evidence: str = "tested") -> Candidate:
    names = [*candidate.names_of("key_lengths")]
    if lengths == "both":
        names += candidate.names_of("query_lengths")
    return candidate.noting("items", f"{', '.join(names)}: {WORDS[lengths]}", evidence)


def _given(candidate: Candidate, probe: Probe) -> Options:
    """Return the options of a call with lengths: all of the first item, fewer of the others."""
    queries, keys = probe.lengths
    options = Options(key_lengths=tuple(_falling(keys, probe.batch)))
    if candidate.claimed("lengths") == "both":
        options = options.change(query_lengths=tuple(_falling(queries, probe.batch)))
    return options


def _falling(length: int, batch: int) -> Iterator[int]:
    """Yield a length of each item, and 1 at least."""
    for item in range(batch):
        yield max(1, length - item)


def _follows(tried: Candidate, probe: Probe) -> bool:
    """Return whether calls with lengths give what the formula gives, with each causal flag."""
    flags = {tried.plainly_causal}
    alignment = tried.claimed("causal")
    if tried.signature.is_causal and alignment:
        flags.add(True)
    options, (queries, _) = _given(tried, probe), probe.lengths
    for flag in flags:
        result = tried.call(probe.inputs, **options.change(is_causal=flag).arguments)
        causal = alignment if flag != tried.plainly_causal else tried.formula.causal
        formula = replace(tried.formula, causal=causal, options=options)
        expected = formula(probe.inputs, tried.weights, None)
        # Queries after those of an item, and those without a key, are of other clauses.
        present = expected.isfinite().all(-1)
        for item, own in enumerate(options.query_lengths or ()):
            present[item, own:queries] = False
        if result is None or not is_close(result.output[present], expected[present]):
            return False
    return True
