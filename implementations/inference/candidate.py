"""One way to understand a class or a kernel: what is declared, how it is tried, and what is found.

Nothing in it changes: a finder returns another candidate.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mha.implementations.adapters.calling import Call, CallByName
from mha.implementations.adapters.compiled import compiled_again
from mha.implementations.adapters.construction import SHORT, Room
from mha.implementations.adapters.kernel import KernelImplementation
from mha.implementations.adapters.module import ModuleImplementation
from mha.implementations.adapters.signature import Signature
from mha.implementations.discovery.raised import Raised
from mha.implementations.inference.biases import most_biases
from mha.implementations.inference.declared import Declared, DeclaredKernel
from mha.implementations.inference.probes import (
    CONFIG,
    GENERAL,
    OWN_HEAD_DIM,
    Formula,
    Inputs,
    Probe,
    SpecialCase,
    each_once,
)
from mha.implementations.inference.rows import Row
from mha.implementations.process.pristine import as_found
from mha.spec import Config, Output, Sizes, Weights
from mha.spec.claims import EmptyRow

GPU = "cuda"
# Stands in a row for the evidence of the formula.
OF_FORMULA = ""
# Ends the row of an option that changes nothing.
NO_EFFECT = " has no effect"


@dataclass(frozen=True)
class Trial:
    """How a class or a kernel is tried.

    formula: what its outputs are compared with.
    special: the case in which they are.
    dtype: of inputs and weights.
    changes: to the configuration.
    is_causal: whether plain calls ask to be causal; None where they do as the formula is causal.
        Where a causal flag does not do what it says, that is what is claimed.
    flag_left_out: whether calls leave the causal flag out, so that the constructor decides.
    few_sizes: whether it is tried in few sizes, as a kernel that raises for others.
    longest: the length for which a module is built that asks for the longest one.
    part: how much of each head the tables are for that its calls require, until a rotation by
        these is claimed.
    """

    formula: Formula = field(default_factory=Formula)
    special: SpecialCase = GENERAL
    dtype: torch.dtype = torch.float64
    changes: Mapping[str, Any] = field(default_factory=dict)
    is_causal: bool | None = None
    flag_left_out: bool = False
    few_sizes: bool = False
    longest: int = SHORT
    part: float = 1.0


@dataclass
class Calls:
    """What the calls of one candidate did.

    module: the attention that was called last.
    raised: what the last call raised that did.
    """

    module: nn.Module = field(default_factory=nn.Module)
    raised: Raised | None = None


@dataclass(frozen=True)
class Candidate:
    """One way to understand a class or a kernel.

    arguments: what the parameters of its constructor are given.
    explained: whether the formula of the trial runs gives its outputs.
    shown: what is special about the only case in which it does, or about one in which no mask can
        be tried.
    assumed: why the format of its masks is assumed, if none explains what they do.
    ignores_masks: whether it is assumed since masks have no effect.
    more_by_mask: what masks do beside hiding keys, so that they are not judged; "" if nothing.
    empty_row: the policy for rows without a key, if one is found.
    idle_flag: a causal flag of the constructor without effect, which is not judged.
    left_out: a value of such a flag that is not judged, so that masks are.
    rows: what was found, by topic.
    """

    declared: Declared
    trial: Trial = field(default_factory=Trial)
    arguments: Mapping[str, str] = field(default_factory=dict)
    explained: bool = False
    shown: str = ""
    assumed: str = ""
    ignores_masks: bool = False
    more_by_mask: str = ""
    empty_row: EmptyRow | None = None
    idle_flag: str = ""
    left_out: str = ""
    rows: Mapping[str, Row] = field(default_factory=dict)
    # Each candidate has its own, even one that is made of another.
    calls: Calls = field(default_factory=Calls, init=False, compare=False)

    def claiming(self, **claims: Any) -> Candidate:
        """Return the candidate with further claims."""
        return self.declaring(claims={**self.claims, **claims})

    def without_claims(self, *names: str) -> Candidate:
        """Return the candidate without the claims of these names."""
        kept = {name: claim for name, claim in self.claims.items() if name not in names}
        return self.declaring(claims=kept)

    def declaring(self, **changes: Any) -> Candidate:
        """Return the candidate with other fields of what is declared."""
        return replace(self, declared=replace(self.declared, **changes))

    def trying(self, **changes: Any) -> Candidate:
        """Return the candidate with other fields of its trial."""
        return replace(self, trial=replace(self.trial, **changes))

    def noting(self, topic: str, finding: str, evidence: str = "tested") -> Candidate:
        """Return the candidate with a row, in place of an earlier one of the same topic."""
        return replace(self, rows={**self.rows, topic: Row(topic, finding, evidence)})

    def explains(self, *topics: str) -> bool:
        """Return whether trial runs have shown what the options of these rows do."""
        rows = [self.rows[topic] for topic in topics if topic in self.rows]
        are_tested = all(row.evidence == "tested" for row in rows)
        return are_tested and not any(row.finding.endswith(NO_EFFECT) for row in rows)

    @property
    def is_kernel(self) -> bool:
        """Whether it is a kernel, which has no projections."""
        return isinstance(self.declared, DeclaredKernel)

    @property
    def label(self) -> str:
        """The name in reports."""
        return self.declared.label

    @property
    def claims(self) -> Mapping[str, Any]:
        """The claims that differ from `Claims()`."""
        return self.declared.claims

    def claimed(self, name: str) -> Any:
        """Return a claim, or its default."""
        return self.declared.claimed(name)

    @property
    def cross_attention(self) -> bool | Literal["memory"]:
        """What its inputs may be, as in `Claims`."""
        return self.declared.cross_attention

    @property
    def sizes(self) -> Sizes:
        """The claimed sizes."""
        claimed: Sizes = self.claimed("sizes")
        return claimed

    @property
    def signature(self) -> Signature:
        """What the parameters of a call mean."""
        return self.declared.signature

    def names_of(self, option: str) -> tuple[str, ...]:
        """Return the names of an argument about the scores; empty if there is none."""
        return self.declared.names_of(option)

    @property
    def formula(self) -> Formula:
        """What the outputs of trial runs are compared with."""
        return replace(self.trial.formula, n_heads=self.config.n_heads)

    @property
    def evidence(self) -> str:
        """How it was found that its formula is that of the module."""
        if self.shown:
            return f"assumed: it explains the output only {self.shown}"
        return "tested" if self.explained else "assumed: its output matches no known formula"

    @property
    def problem(self) -> str:
        """What a call raised, as a line; "" if none did."""
        return self.calls.raised.text if self.calls.raised else ""

    @property
    def probes(self) -> tuple[Probe, ...]:
        """The inputs of trial runs."""
        special, multiple = self.trial.special, self.sizes.length_multiple
        return special.probes(self.cross_attention, multiple, self.config.n_heads)

    @property
    def device(self) -> str:
        """The device of trial runs."""
        return GPU if self.claims.get("devices") == {"cuda"} else "cpu"

    @property
    def config(self) -> Config:
        """The configuration of trial runs."""
        changes: dict[str, Any] = {"bias": most_biases(self.claims.get("bias", {True}))}
        base = CONFIG
        if self.sizes == replace(self.sizes, n_heads={1}):
            base = replace(CONFIG, n_heads=1)
        if "multi_query" in self.claims:
            changes["n_kv_heads"] = 1
        norm = self.claims.get("qk_norm")
        if norm and norm.weight:
            changes["norm_weights"] = norm.over
        fitting = self.sizes.fit_head_dim(base.head_dim)
        if "own_head_dim" in self.claims:
            changes["d_head"] = self._own_head_dim
        elif fitting != base.head_dim:
            changes["d_head"] = fitting
        return replace(base, **{**changes, **self.trial.changes})

    @property
    def _own_head_dim(self) -> int:
        """A claimed width of a head that is not that of d_model by the number of heads."""
        width = self.sizes.fit_head_dim(OWN_HEAD_DIM)
        return self.sizes.fit_head_dim(width + 1) if width == CONFIG.head_dim else width

    @property
    def weights(self) -> Weights:
        """The weights of trial runs."""
        return self.trial.special.weights_of(self.config)

    @property
    def plainly_causal(self) -> bool:
        """Whether a call without a mask asks to be causal, so that the formula gives its output."""
        if self.trial.is_causal is not None:
            return self.trial.is_causal
        return self.formula.causal is not None

    def passes(self, check: Callable[[Candidate, Probe], bool]) -> bool:
        """Return whether a check holds for each probe."""
        return all(check(self, probe) for probe in self.probes)

    def mask_of(self, probe: Probe, axes: str, *, causal: bool = False) -> Tensor:
        """Return a mask as `Probe.mask` does, or one of the first keys where it is their number."""
        mask = probe.mask(axes, causal=causal or self.formula.causal is not None)
        if self.declared.masks.counts_keys:
            return mask.sort(-1, descending=True).values
        return mask

    def implementation(self) -> ModuleImplementation | KernelImplementation:
        """Return the implementation that trial runs call."""
        made = self.declared.implementation()
        if isinstance(made, ModuleImplementation):
            made = replace(made, room=Room(self.trial.longest))
        return replace(made, call=self._as_called(made.call))

    def _as_called(self, call: Call) -> Call:
        """Return a call with tables as they are tried, without a causal flag that is left out."""
        if not isinstance(call, CallByName):
            return call
        signature = call.signature
        if signature.shaped:
            signature = replace(signature, part=self.trial.part)
        if self.trial.flag_left_out:
            signature = replace(signature, is_causal=None)
        return replace(call, signature=signature)

    def call(
        self,
        inputs: Inputs,
        *,
        training: bool = False,
        change: Callable[[nn.Module], object] | None = None,
        **options: Any,
    ) -> Output | None:
        """Build the module and call it; if that raises, return None, and note it in `calls`.

        change: is given the module before the call.
        options: of the call.
        """
        dtype = self.trial.dtype
        given = each_once(lambda x: x.to(self.device, dtype), inputs)
        mask = options.get("mask")
        if isinstance(mask, Tensor):
            of_numbers = mask.is_floating_point()
            options["mask"] = mask.to(self.device, dtype if of_numbers else mask.dtype)
        # Without gradients, a module may take other masks, as the fast path of
        # `torch.nn.MultiheadAttention` does.
        with torch.enable_grad(), as_found(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of inputs that it may not take
            try:
                weights = self.weights.to(dtype)
                attention: Any = self.implementation().build(
                    self.config, weights, dtype=dtype, device=self.device
                )
                if change:
                    change(attention.module)
                called = attention.train(training)
                self.calls.module = called
                result = compiled_again(lambda: called(*given, **options))
                return Output(*map(_on_the_cpu, result))
            except (Exception, SystemExit) as error:  # the class may raise anything
                self.calls.raised = Raised.of(error)
                return None

    def call_plainly(self, inputs: Inputs, **options: Any) -> Output | None:
        """Call it without a mask, and causally only if it always is."""
        return self.call(inputs, is_causal=self.plainly_causal, **options)


def _on_the_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def without_gradients(candidate: Candidate) -> Candidate:
    """Return a candidate without gradients: its weights require none, in trial runs too."""
    claiming = candidate.claiming(gradients=False)
    return claiming.noting("gradients", "none: with them, calls raise")


def on_a_gpu(candidate: Candidate) -> Candidate:
    """Return a candidate that claims only a GPU, and is tried there."""
    claiming = candidate.claiming(devices={"cuda"})
    return claiming.noting("devices", "a GPU: on the CPU, calls raise")


def may_need_a_gpu(candidate: Candidate) -> bool:
    """Return whether a candidate whose calls raise may be tried on a GPU."""
    return "devices" not in candidate.claims and torch.cuda.is_available()
