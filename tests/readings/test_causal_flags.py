"""A causal flag fails if it does not do what it says, and is judged as it is if it does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.conformance.reports.sentence import sentence
from mha.implementations.discovery.resolve import as_resolved
from support.judging import RIGHT, expect_conforms, expect_pass, judged
from support.readings import evidence, findings

attention = nn.functional.scaled_dot_product_attention
CLAUSES = ("HED-1", "CAU-1", "CAU-2", "CAU-3", "CAU-4")


class Base(nn.Module):
    """Self-attention that is causal if it is told so, beside a mask too."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def attend(self, x: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        context = kernel(q, k, v, mask, causal=causal)
        output: Tensor = self.out(context.transpose(1, 2).flatten(2))
        return output


def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool) -> Tensor:
    visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    visible = visible.tril() if causal else visible
    return attention(q, k, v, visible if mask is None else visible & mask.bool())


class Always(Base):
    def forward(self, x: Tensor, is_causal: bool = False) -> Tensor:
        return self.attend(x, True)


class AlwaysByDefault(Base):
    def forward(self, x: Tensor, causal: bool = True, attn_mask: Tensor | None = None) -> Tensor:
        return self.attend(x, True, attn_mask)


class Never(Base):
    def forward(self, x: Tensor, use_causal: bool = False) -> Tensor:
        return self.attend(x, False)


class NeverBesideMasks(Base):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal_mask: bool = False) -> Tensor:
        return self.attend(x, False, mask)


class Opposite(Base):
    def forward(self, x: Tensor, apply_causal_mask: bool = False) -> Tensor:
        return self.attend(x, not apply_causal_mask)


class RequiredAndIgnored(Base):
    def forward(self, x: Tensor, use_causal_mask: bool) -> Tensor:
        return self.attend(x, False)


class Built(Base):
    """Of a flag of the constructor; each subclass keeps another value."""

    def __init__(self, d_model: int, n_heads: int, causal: bool = False) -> None:
        super().__init__(d_model, n_heads)
        self.causal = self.kept(causal)

    def kept(self, causal: bool) -> bool:
        return causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, self.causal, mask)


class BuiltAlways(Built):
    def kept(self, causal: bool) -> bool:
        return True


class BuiltNever(Built):
    def kept(self, causal: bool) -> bool:
        return False


class BuiltOpposite(Built):
    def kept(self, causal: bool) -> bool:
        return not causal


class BuiltAlwaysWithAnEffect(Built):
    """Causal whatever its flag is, which scales the output."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, True, mask) * (2 if self.causal else 1)


class BuiltNeverByDefault(BuiltNever):
    def __init__(self, d_model: int, n_heads: int, autoregressive: bool = True) -> None:
        super().__init__(d_model, n_heads, autoregressive)


class BuiltAlwaysByDefault(BuiltAlways):
    def __init__(self, d_model: int, n_heads: int, masked: bool = True) -> None:
        super().__init__(d_model, n_heads, masked)


class RequiredToBuild(BuiltNever):
    def __init__(self, d_model: int, n_heads: int, is_causal: bool) -> None:
        super().__init__(d_model, n_heads, is_causal)


class IgnoredBesideAFlag(Built):
    """The flag of the call works, and that of the constructor does not."""

    def forward(self, x: Tensor, is_causal: bool = False) -> Tensor:  # type: ignore[override]  # another signature
        return self.attend(x, is_causal)


class Heads(nn.Module):
    """A kernel as a class, whose constructor ignores the flag."""

    def __init__(self, causal: bool = False, dropout: float = 0.1) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return kernel(q, k, v, attn_mask, causal=False)


class HeadsAlways(Heads):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return kernel(q, k, v, attn_mask, causal=True)


def always(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return kernel(q, k, v, causal=True)


def always_from_the_end(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return attention(
        q,
        k,
        v,
        torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2]),
    )


def always_beside_masks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    return kernel(q, k, v, mask, causal=True)


def unless_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    return kernel(q, k, v, mask, causal=mask is None)


def never(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = True
) -> Tensor:
    return kernel(q, k, v, mask, causal=False)


def make(d_model: int, n_heads: int, causal: bool = False) -> nn.Module:
    return BuiltNever(d_model, n_heads)


IS, IS_NOT = "has no effect: each call is causal", "has no effect: no call is causal"
OF_IS, OF_IS_NOT = (f"of the constructor {text}; judged with" for text in (IS, IS_NOT))
OPPOSITE = (
    "=False of the constructor makes calls causal, and causal=True the other way round; judged with"
    " causal=False"
)
# What is judged, and what is said about its flag.
IDLE: dict[Callable[..., Any], str] = {
    Always: f"is_causal {IS}",
    AlwaysByDefault: f"causal {IS}",
    Never: f"use_causal {IS_NOT}",
    NeverBesideMasks: f"causal_mask {IS_NOT}",
    Opposite: "calls are causal with apply_causal_mask=False",
    RequiredAndIgnored: f"use_causal_mask {IS_NOT}",
    BuiltAlways: f"causal {OF_IS} causal=False",
    BuiltOpposite: f"causal{OPPOSITE}",
    BuiltAlwaysWithAnEffect: (
        "causal=False of the constructor makes calls causal; judged with causal=False"
    ),
    BuiltNeverByDefault: f"autoregressive {OF_IS_NOT} autoregressive=True",
    BuiltAlwaysByDefault: f"masked {OF_IS} masked=False",
    RequiredToBuild: f"is_causal {OF_IS_NOT} is_causal=True",
    HeadsAlways: f"causal {OF_IS} causal=False",
    always: f"causal {IS}",
    always_from_the_end: f"is_causal {IS}",
    always_beside_masks: f"causal {IS}",
    unless_masked: f"causal {IS}",
    never: f"causal {IS_NOT}",
}


@pytest.mark.mostly_slow(2)
@pytest.mark.usefixtures("undiagnosed", "unshrunk")
@pytest.mark.parametrize("written", IDLE, ids=lambda written: written.__name__)
def test_flag_that_does_not_do_what_it_says_fails(written: Callable[..., Any]) -> None:
    resolved = as_resolved(written)
    assert resolved.inference
    assert findings(resolved.inference)["causal"] == IDLE[written]
    assert evidence(resolved.inference)["causal"] == "tested"
    report = judged(resolved.implementation, CLAUSES)
    assert "fail" in [verdict.status for verdict in report.verdicts]


@pytest.mark.usefixtures("undiagnosed", "unshrunk")
@pytest.mark.parametrize(
    "written", [BuiltNever, IgnoredBesideAFlag, Heads, make], ids=lambda each: each.__name__
)
def test_idle_flag_of_a_constructor_is_named_in_the_verdict(written: Callable[..., Any]) -> None:
    """Classes of diffusers and transformers have such flags, which other classes read."""
    resolved = as_resolved(written)
    assert resolved.inference
    finding = findings(resolved.inference)["causal"]
    assert finding.endswith("; causal of the constructor has no effect")
    assert "causal (has no effect)" in resolved.inference.not_covered
    report = judged(resolved, CLAUSES, RIGHT)
    assert report.exit_status == 0
    said = sentence(report.verdicts, report.not_covered[resolved.implementation.name])
    assert said.startswith("CONFORMS where judged; not covered: ")


def test_value_that_is_judged_is_shown_and_declared() -> None:
    inference = as_resolved(RequiredToBuild).inference
    assert inference
    assert "RequiredToBuild(d_model=d_model, n_heads=n_heads, is_causal=True)" in inference.report()
    assert "    partial(RequiredToBuild, is_causal=True),\n" in inference.declaration
    inference = as_resolved(HeadsAlways).inference
    assert inference
    assert "    HeadsAlways(dropout=0.0, causal=False),\n" in inference.declaration


class Works(Base):
    def forward(
        self, x: Tensor, mask: Tensor | None = None, causal_attention: bool = False
    ) -> Tensor:
        return self.attend(x, causal_attention, mask)


class AlwaysWithoutAFlag(Base):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, True, mask)


class BuiltCausal(Built):
    def __init__(self, d_model: int, n_heads: int, use_causal_mask: bool = True) -> None:
        super().__init__(d_model, n_heads, use_causal_mask)


class BuiltOrCalled(Built):
    """Causal if either flag says so, by default."""

    def __init__(self, d_model: int, n_heads: int, causal: bool = True) -> None:
        super().__init__(d_model, n_heads, causal)

    def forward(self, x: Tensor, is_causal: bool = False) -> Tensor:  # type: ignore[override]  # another signature
        return self.attend(x, self.causal or is_causal)


class BuiltAndCalled(BuiltOrCalled):
    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:  # type: ignore[override]  # another signature
        return self.attend(x, self.causal and is_causal)


class CallsOverride(Built):
    """The flag of the constructor counts where a call gives none."""

    def forward(self, x: Tensor, is_causal: bool | None = None) -> Tensor:  # type: ignore[override]  # another signature
        return self.attend(x, self.causal if is_causal is None else is_causal)


class MaskedSaysThatMasksCount(Built):
    """Its flag is not a causal one, though its name is that of many."""

    def __init__(self, d_model: int, n_heads: int, masked: bool = True) -> None:
        super().__init__(d_model, n_heads)
        self.masked = masked

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, False, mask if self.masked else None)


class MaskedOfAnotherName(MaskedSaysThatMasksCount):
    """The same, with a mask that no name tells."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:  # type: ignore[override]  # another signature
        return self.attend(x, False, hidden if self.masked else None)


class CausalWithoutAMemory(Base):
    """Its flag counts in self-attention alone."""

    def __init__(self, d_model: int, n_heads: int, causal: bool = True) -> None:
        super().__init__(d_model, n_heads)
        self.causal = causal

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q = self.qkv(x).chunk(3, -1)[0]
        _, k, v = self.qkv(x if context is None else context).chunk(3, -1)
        heads = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (q, k, v))
        output: Tensor = kernel(*heads, causal=self.causal and context is None)
        return self.out(output.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # of a layer


class AsInTransformers(Built):
    """The config chooses a function that reads the flag, or one whose masks the model makes."""

    def __init__(self, config: Any, is_causal: bool = False) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads)
        self.config, self.is_causal = config, is_causal

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]  # another signature
        is_eager = self.config._attn_implementation == "eager"
        return self.attend(hidden_states, self.is_causal and not is_eager, attention_mask)


class OfAWord(Base):
    """Flags that are called causal, and are no causal flags."""

    def __init__(self, d_model: int, n_heads: int, is_causal_lm: bool = False) -> None:
        super().__init__(d_model, n_heads)

    def forward(self, x: Tensor, non_causal: bool = True) -> Tensor:
        return self.attend(x, False)


class HeadsOfAFlag(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(q, k, v, causal=self.causal)


def square_only(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError("causal attention needs as many keys as queries")
    return kernel(q, k, v, causal=causal)


WORKS: dict[Callable[..., Any], str] = {
    Works: "causal_attention, aligned top_left",
    AlwaysWithoutAFlag: "always",
    BuiltCausal: "always",
    BuiltOrCalled: "is_causal, aligned top_left",
    BuiltAndCalled: "is_causal, aligned top_left",
    CallsOverride: "is_causal, aligned top_left",
    MaskedSaysThatMasksCount: "through the mask, aligned top_left",
    MaskedOfAnotherName: (
        "no; to judge it causal too, check functools.partial(MaskedOfAnotherName, masked=True)"
    ),
    CausalWithoutAMemory: (
        "no; to judge it causal too, check functools.partial(CausalWithoutAMemory, causal=True)"
    ),
    AsInTransformers: "through the mask, aligned top_left",
    OfAWord: "no",
    HeadsOfAFlag: "no",
    square_only: "causal, aligned top_left",
}


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("written", WORKS, ids=lambda written: written.__name__)
def test_flag_that_works_is_judged_as_it_is(written: Callable[..., Any]) -> None:
    resolved = as_resolved(written)
    assert resolved.inference
    assert findings(resolved.inference)["causal"] == WORKS[written]
    expect_pass(resolved.implementation, also=CLAUSES)


def test_flag_that_a_partial_sets_is_left_alone() -> None:
    resolved = as_resolved(partial(BuiltAlways, causal=True))
    assert resolved.implementation.claims.always_causal
    expect_conforms(resolved.implementation, ["CAU-1"])


class CausalWithoutMasks(BuiltCausal):
    """Where it is causal, masks are ignored."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, self.causal, None if self.causal else mask)


@pytest.mark.slow
def test_default_that_is_switched_off_so_that_masks_are_judged_is_named() -> None:
    resolved = as_resolved(CausalWithoutMasks)
    assert resolved.inference
    assert resolved.inference.not_covered == ("use_causal_mask=True",)
    assert "not judged   use_causal_mask=True  [unless declared]" in resolved.inference.report(200)
