"""What a call may say about the scores: found by the name of an argument, and by trial runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar, NamedTuple, get_args

from torch import Tensor

from mha.implementations.inference.candidate import NO_EFFECT, Candidate
from mha.implementations.inference.nearest_projections import agree
from mha.implementations.inference.probes import Formula, Probe, is_close
from mha.spec import Claims, Options, Scores, causal_mask
from mha.spec.claims import Alignment

RANGES = {"any": "any number", "positive": "positive numbers"}
# Of a scale that counts in calls with one causal flag only, by that.
IN_SOME_CALLS = {
    False: "assumed: it does not in causal calls",
    True: "assumed: it does so in causal calls only",
}
BY_NAME_ALONE = "assumed by its name: no reading gives what it does"


class Acts(NamedTuple):
    """How an option acts: as a reading says, or otherwise.

    otherwise: in words.
    like: the value by which a right option gives the same.
    aligned: the end from which places are counted, if it is not that of causal calls.
    """

    otherwise: str = ""
    like: Callable[[Any], Any] = lambda value: value
    aligned: Alignment | None = None


AS_READ = Acts()
IGNORED = Acts("it has no effect", lambda _: None)


class ScoreOption:
    """An option of calls: what it may mean, and how it is tried.

    name: its field of `Scores` and of `Signature`, and its argument of a call.
    without_effect: what a row says of an option of the constructor that changes no call.
    """

    name: ClassVar[str]
    without_effect: ClassVar[str] = NO_EFFECT

    def names(self, candidate: Candidate) -> tuple[str, ...]:
        """Return the name of its argument, or two; none where there is no such argument."""
        return candidate.names_of(self.name)

    def is_of_calls(self, candidate: Candidate) -> bool:
        """Return whether its argument is one of a call."""
        return candidate.declared.takes_in_calls(self.name)

    def readings(self, candidate: Candidate) -> Iterable[Scores]:
        """Return the ways to read the argument, the usual ones of its name first."""
        raise NotImplementedError

    def values(self, scores: Scores) -> Iterable[Any]:
        """Return the values that are passed."""
        raise NotImplementedError

    def value_for(self, scores: Scores, probe: Probe, value: Any) -> Any:
        """Return a value as it is passed beside the inputs of a probe."""
        del scores, probe
        return value

    def words(self, scores: Scores) -> str:
        """Return what a reading says."""
        raise NotImplementedError

    def usual(self, candidate: Candidate, readings: Sequence[Scores]) -> Sequence[Scores]:
        """Return the readings that may be assumed."""
        del candidate
        return readings[:1]

    def flags(self, candidate: Candidate, scores: Scores, *, ignored: bool) -> tuple[bool, ...]:
        """Return the causal flags of the calls.

        ignored: whether the option may have no effect.
        """
        del scores, ignored
        return (candidate.plainly_causal,)

    def flags_taken(self, candidate: Candidate, scores: Scores) -> tuple[bool, ...]:
        """Return both causal flags, where there is one, and any value is taken without it."""
        if candidate.plainly_causal:
            return (True,)
        if not has_causal_calls(candidate):
            return (False,)
        inputs = candidate.probes[0].inputs
        for value in self.values(scores):
            if candidate.call(inputs, is_causal=False, **{self.name: value}) is not None:
                return (False, True)
        return (True,)

    def mask(self, candidate: Candidate, probe: Probe) -> Tensor | None:
        """Return the mask of the calls."""
        del candidate, probe
        return None

    def completed(self, candidate: Candidate) -> Candidate:
        """Return the candidate with what follows from a reading that explains the option."""
        return candidate

    def remark(self, candidate: Candidate) -> str:
        """Return what else is to be said of the reading that is claimed."""
        del candidate
        return ""

    def nearly(self, candidate: Candidate, scores: Scores) -> Iterator[Acts]:
        """Yield how the option may act that follows a reading in everything else."""
        claimed = Claims(causal=candidate.claimed("causal"), scores=scores).alignment
        for other in get_args(Alignment):
            if candidate.claimed("causal") and other != claimed:
                words = f"its places are counted {other}, and those of causal calls {claimed}"
                yield Acts(words, aligned=other)

    def find(self, candidate: Candidate) -> Candidate:
        """Claim the option, if a parameter has its name, as trial runs show.

        Without an effect, or with another one, it is claimed as its name says, and fails then. One
        of the constructor is not, since that may only keep it for others.
        """
        if not (candidate.explained and self.names(candidate)):
            return candidate
        readings = list(self.readings(candidate))
        for scores in readings:
            if self.follows(candidate, scores):
                return self.noted(self.completed(candidate.claiming(scores=scores)))
        if not self.is_of_calls(candidate):
            return self._of_others(candidate, readings)
        return self._by_name(candidate, readings)

    def _of_others(self, candidate: Candidate, readings: Sequence[Scores]) -> Candidate:
        """Return the candidate with a row if the option of its constructor changes no call."""
        for scores in self.usual(candidate, readings):
            if self.follows(candidate, scores, IGNORED):
                called = ", ".join(self.names(candidate))
                return candidate.noting(self.name, called + self.without_effect)
        return candidate

    def _by_name(self, candidate: Candidate, readings: Sequence[Scores]) -> Candidate:
        """Claim what the name says, with what is known of an argument that no reading explains."""
        usual = self.usual(candidate, readings)
        for scores in usual:
            if self.follows(candidate, scores, IGNORED):
                return self.noted(candidate.claiming(scores=scores), is_idle=True)
        for scores in readings if usual else ():
            for acts in self.nearly(candidate, scores):
                if self.follows(candidate, scores, acts):
                    near = f"assumed by its name: {acts.otherwise}"
                    return self.noted(candidate.claiming(scores=scores), near)
        for scores in usual:
            if self.is_taken(candidate, scores):
                return self.noted(candidate.claiming(scores=scores), BY_NAME_ALONE)
        return candidate

    def noted(
        self, candidate: Candidate, evidence: str = "tested", *, is_idle: bool = False
    ) -> Candidate:
        """Return a candidate that claims the option with the row about it."""
        called = ", ".join(self.names(candidate))
        if is_idle:
            return candidate.noting(self.name, called + NO_EFFECT)
        words = self.words(candidate.claimed("scores")) + self.remark(candidate)
        return candidate.noting(self.name, f"{called}: {words}", evidence)

    def follows(self, candidate: Candidate, scores: Scores, acts: Acts = AS_READ) -> bool:
        """Return whether calls with the option give what the formula gives that acts so."""
        tried = candidate.claiming(scores=scores)
        flags = self.flags(tried, scores, ignored=acts is IGNORED)
        for probe, value, flag in product(tried.probes, self.values(scores), flags):
            mask = self.mask(tried, probe)
            given = {self.name: self.value_for(scores, probe, value)}
            options = Options(mask=mask, is_causal=flag).change(**given)
            result = tried.call(probe.inputs, **options.arguments)
            shown = options.change(**{self.name: acts.like(given[self.name])})
            formula = formula_with(tried, shown)
            if acts.aligned:
                formula, mask = _aligned_apart(formula, acts.aligned, probe)
            expected = formula(probe.inputs, tried.weights, mask)
            if result is None:
                if not _may_raise(tried, expected):
                    return False
            elif not is_close(result.output, expected):
                return False
        return True

    def is_taken(self, candidate: Candidate, scores: Scores) -> bool:
        """Return whether calls with the option return anything."""
        tried = candidate.claiming(scores=scores)
        flag = self.flags(tried, scores, ignored=False)[-1]
        inputs = tried.probes[0].inputs
        for value in self.values(scores):
            if tried.call(inputs, is_causal=flag, **{self.name: value}) is None:
                return False
        return True


def _may_raise(tried: Candidate, expected: Tensor) -> bool:
    """Return whether a call may raise: a query has no key, and gets an error, as far as known."""
    is_error = tried.empty_row == "error"
    is_unknown = tried.empty_row is None and not tried.declared.mask
    return (is_error or is_unknown) and bool(expected.isnan().any())


def possible_alignments(candidate: Candidate) -> tuple[Alignment | None, ...]:
    """Return the ends from which places may be counted; only the one that is claimed, if any is."""
    claimed: Scores = candidate.claimed("scores")
    if candidate.claimed("causal") or claimed.alignment:
        return (claimed.alignment,)
    return "top_left", "bottom_right"


def has_causal_calls(candidate: Candidate) -> bool:
    """Return whether a flag makes calls causal; what one does otherwise is of other clauses."""
    is_understood = candidate.trial.is_causal is None
    return bool(candidate.signature.is_causal and candidate.claimed("causal") and is_understood)


def aligned(scores: Scores) -> str:
    """Return in words where places are counted from, if the causal mask does not say it."""
    if scores.alignment is None:
        return ""
    return f", aligned {scores.alignment.replace('_', '-')}"


def formula_with(tried: Candidate, options: Options) -> Formula:
    """Return the formula with the options of a call.

    A plain call is causal as the formula was found to be, another one as it is claimed to be.
    """
    scores, causal = tried.claimed("scores"), tried.formula.causal
    alignment = Claims(causal=tried.claimed("causal"), scores=scores).alignment or "top_left"
    if options.is_causal != tried.plainly_causal:
        causal = alignment if options.is_causal else None
    claimed = replace(scores, alignment=alignment)
    return replace(tried.formula, causal=causal, options=options, claimed=claimed)


def _aligned_apart(
    formula: Formula, alignment: Alignment, probe: Probe
) -> tuple[Formula, Tensor | None]:
    """Return a formula with options of another alignment, and its causal mask as a mask."""
    mask = causal_mask(*probe.lengths, formula.causal) if formula.causal else None
    options = formula.options.change(is_causal=False)
    claimed = replace(formula.claimed, alignment=alignment)
    return replace(formula, causal=None, options=options, claimed=claimed), mask


def find_scale(candidate: Candidate) -> Candidate:
    """Claim an explicit scale, if there is a parameter for one that multiplies the scores.

    Where it does so in some calls only, causal ones or others, it is claimed, and fails.
    """
    names = candidate.names_of("scale")
    if not (candidate.explained and names):
        return candidate
    claimed = candidate.claimed("scores")
    tried = candidate.claiming(scores=replace(claimed, scale="any"))
    name, flags = names[0], _causal_flags(tried)
    scaled = [flag for flag in flags if _multiplies(tried, 2.0, flag)]
    if not scaled:
        if candidate.declared.takes_in_calls("scale") and _is_ignored(tried):
            return tried.noting("scale", name + NO_EFFECT)
        return candidate
    takes_any = all(_multiplies(tried, factor, flag) for factor in (0.0, -1.0) for flag in scaled)
    scores = replace(claimed, scale="any" if takes_any else "positive")
    assert scores.scale
    evidence = "tested"
    if scaled != flags:
        evidence = IN_SOME_CALLS[scaled[0]]
    found = f"{name} multiplies the scores; {RANGES[scores.scale]}"
    return candidate.claiming(scores=scores).noting("scale", found, evidence)


def _causal_flags(tried: Candidate) -> list[bool]:
    """Return the causal flag of plain calls, and the other one, where calls may have it."""
    if has_causal_calls(tried) and not tried.plainly_causal:
        return [False, True]
    return [tried.plainly_causal]


def _is_ignored(tried: Candidate) -> bool:
    """Return whether calls with any scale return what calls without one do.

    A flag of such a name says whether scores are scaled.
    """
    (name, *_) = tried.names_of("scale")
    if isinstance(tried.declared.forward_parameters[name].default, bool):
        return False
    for probe in tried.probes:
        plain = tried.call_plainly(probe.inputs)
        for scale in (0.25, 3.0):
            if not agree(tried.call_plainly(probe.inputs, scale=scale), plain):
                return False
    return True


def _multiplies(tried: Candidate, factor: float, is_causal: bool) -> bool:
    """Return whether calls with the usual scale times a factor give what the formula then does."""
    formula = tried.formula
    if is_causal and not tried.plainly_causal:
        formula = replace(formula, causal=tried.claimed("causal"))
    scale = factor * formula.scale_for(tried.config.head_dim)
    inputs = tried.probes[0].inputs
    result = tried.call(inputs, is_causal=is_causal, scale=scale)
    expected = replace(formula, options=Options(scale=scale))
    return result is not None and is_close(result.output, expected(inputs, tried.weights, None))
