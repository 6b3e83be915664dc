"""What each finder makes of calls whose answers are known: no module is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from mha.implementations.discovery.raised import Raised
from mha.implementations.inference.alibi import ALIBI
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.causal import find_causal
from mha.implementations.inference.declared import DeclaredKernel
from mha.implementations.inference.empty_rows import find_empty_row
from mha.implementations.inference.mask_search import find_masks, given_a_mask
from mha.implementations.inference.nearest_masks import nearest_format
from mha.implementations.inference.nearest_projections import code_of_each_raises
from mha.implementations.inference.sizes import find_widths
from mha.implementations.inference.softcaps import SOFTCAP
from mha.implementations.inference.token_positions import moves_positions
from mha.implementations.inference.windows import WINDOW
from mha.spec import Alibi, MaskConvention, Options, Rotary, Scores, Sizes, Window
from mha.spec.scores import AlibiForm, Alignment, SoftcapPlace, WindowForm
from support.stubs import Answer, of_formula, stub


def of_two(q: Tensor, k: Tensor, v: Tensor, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    raise NotImplementedError


def of_one(q: Tensor, k: Tensor, v: Tensor, sliding_window: int = -1) -> Tensor:
    raise NotImplementedError


def bounds_of(form: WindowForm, numbers: tuple[int | None, ...]) -> Any:
    """Return the bounds that a kernel reads from numbers, where -1 is none."""
    first, *rest = (None if number == -1 else number for number in numbers)
    counted = None if first is None else first - 1
    return {
        "left_right": (first, *rest),
        "count_right": (counted, *rest),
        "left": (first, None),
        "count": (counted, None if counted is None else 0),
        "symmetric": (first, first),
    }[form]


@pytest.mark.parametrize("form", get_args(WindowForm))
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_form_of_a_window_is_the_one_that_explains_calls(
    form: WindowForm, alignment: Alignment
) -> None:
    kernel = of_two if "right" in form else of_one

    def answer(candidate: Candidate, inputs: Any, options: dict[str, Any]) -> Tensor | None:
        numbers = candidate.claimed("scores").window.numbers(options["window"])
        if None in numbers or len(numbers) != (2 if kernel is of_two else 1):
            return None
        asked = Options(window=bounds_of(form, numbers))
        return of_formula(candidate, inputs, asked, Scores(alignment=alignment))

    found = WINDOW.find(stub(kernel, answer))
    assert found.claims["scores"] == Scores(window=Window(form), alignment=alignment)
    assert found.rows["window"].evidence == "tested"


def with_cap(q: Tensor, k: Tensor, v: Tensor, softcap: float = 0.0) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize("place", get_args(SoftcapPlace))
def test_place_of_a_cap_shows_beside_a_float_mask(place: SoftcapPlace) -> None:
    def answer(candidate: Candidate, inputs: Any, options: dict[str, Any]) -> Tensor:
        return of_formula(candidate, inputs, Options(**options), Scores(softcap=place))

    candidate = stub(with_cap, answer).declaring(mask="additive").claiming(masks={"float"})
    assert SOFTCAP.find(candidate).claims["scores"] == Scores(softcap=place)


@pytest.mark.parametrize(
    ("factor", "finding", "evidence"),
    [
        (None, "softcap has no effect", "tested"),
        (
            2.0,
            "softcap: scores s become c tanh(s / c), before any mask",
            "assumed by its name: no reading gives what it does",
        ),
    ],
    ids=["idle", "doubled"],
)
def test_cap_that_no_reading_explains_is_claimed_by_its_name(
    factor: float | None, finding: str, evidence: str
) -> None:
    def answer(candidate: Candidate, inputs: Any, options: dict[str, Any]) -> Tensor:
        cap = factor and factor * options["softcap"]
        return of_formula(candidate, inputs, Options(softcap=cap), Scores())

    found = SOFTCAP.find(stub(with_cap, answer))
    assert found.claims["scores"] == Scores(softcap="before_bias")
    assert found.rows["softcap"] == ("softcap", finding, evidence)


def test_option_that_no_call_takes_is_not_claimed() -> None:
    found = SOFTCAP.find(stub(with_cap, lambda candidate, inputs, options: None))
    assert "scores" not in found.claims
    assert not found.rows


def with_slopes(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize("form", get_args(AlibiForm))
def test_form_of_slopes_is_the_one_that_explains_calls(form: AlibiForm) -> None:
    claimed = Scores(alibi=Alibi(form), alignment="bottom_right")

    def answer(candidate: Candidate, inputs: Any, options: dict[str, Any]) -> Tensor:
        return of_formula(candidate, inputs, Options(alibi=options["alibi"]), claimed)

    scores = ALIBI.find(stub(with_slopes, answer)).claims["scores"]
    assert scores.alibi == Alibi(form, per_item=True)
    # A signed bias gives the same from each end.
    assert scores.alignment == ("top_left" if form == "signed" else "bottom_right")


def with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    raise NotImplementedError


def answer_of(convention: MaskConvention) -> Answer:
    """Return the answers of a kernel that takes boolean masks of a convention only."""

    def answer(candidate: Candidate, inputs: Any, options: dict[str, Any]) -> Tensor | None:
        declared, mask = candidate.declared, options.get("mask")
        if mask is not None and (declared.mask == "additive" or declared.mask_numbers):
            return None
        if mask is not None and (declared.mask_shape or mask.dtype != torch.bool):
            return None
        if mask is not None and declared.mask != convention:
            mask = ~mask
        return of_formula(candidate, inputs, Options(mask=mask), Scores())

    return answer


@pytest.mark.parametrize("convention", ["keep", "drop"])
def test_convention_of_masks_is_the_one_that_explains_calls(convention: MaskConvention) -> None:
    found = find_masks(stub(with_mask, answer_of(convention)))
    assert (found.declared.mask, found.declared.mask_shape) == (convention, None)
    assert not found.assumed


def test_masks_without_an_effect_are_assumed() -> None:
    def answer(candidate: Candidate, inputs: Any, options: dict[str, Any]) -> Tensor:
        return of_formula(candidate, inputs, Options(), Scores())

    found = nearest_format([stub(with_mask, answer)])
    assert found
    assert found.ignored
    assert found.assumed == "assumed: masks have no effect; if that is meant, declare mask=None"


@pytest.mark.parametrize(
    ("policy", "claims"),
    [("zeros", {}), ("uniform", {"empty_row": "uniform"}), ("nan", {"empty_row": "nan"})],
)
def test_policy_of_rows_without_a_key_is_what_they_get(policy: str, claims: dict[str, str]) -> None:
    def answer(candidate: Candidate, inputs: Any, options: dict[str, Any]) -> Tensor:
        mask = options["mask"]
        if policy == "uniform":  # as with scores that are all the lowest number
            mask = mask | ~mask.any(-1, keepdim=True)
        output = of_formula(candidate, inputs, Options(mask=mask), Scores())
        zeros = torch.zeros(output.shape[-1], dtype=output.dtype) + candidate.weights.b_o
        empty = ~options["mask"].any(-1)[:, 0]
        if policy == "uniform":
            equal = replace(candidate.weights, w_q=candidate.weights.w_q * 0)
            equal = replace(equal, b_q=candidate.weights.b_q * 0)
            output[empty] = candidate.formula(inputs, equal, None)[empty]
        if policy == "zeros":
            output[empty] = zeros
        return output

    candidate = stub(with_mask, answer).declaring(mask="keep")
    found = find_empty_row(candidate)
    assert found.empty_row == policy
    assert {name: claim for name, claim in found.claims.items() if name != "causal"} == claims


@pytest.mark.parametrize(
    ("takes", "sizes"),
    [
        (lambda width: True, Sizes()),
        (lambda width: width % 2 == 0, Sizes(head_dim_multiple=2)),
        (lambda width: width % 2 == 0 and width > 2, Sizes(head_dim_multiple=4)),
        (lambda width: width % 8 == 0 and width <= 64, Sizes(head_dim_multiple=8, max_head_dim=64)),
        (lambda width: width in (64, 128), Sizes(head_dims={64, 128})),
    ],
    ids=["all", "even", "from-4", "up-to-64", "two"],
)
def test_widths_are_those_that_do_not_raise(takes: Callable[[int], bool], sizes: Sizes) -> None:
    def answer(candidate: Candidate, inputs: Any, options: dict[str, Any]) -> Tensor | None:
        return inputs[0] if takes(candidate.config.head_dim) else None

    found = find_widths(stub(with_mask, answer))
    assert found.sizes == sizes
    assert ("head_dim" in found.rows) == (sizes != Sizes())


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize("needs_mask", [True, False])
def test_a_mask_is_tried_in_each_call_only_where_it_changes_what_is_raised(
    needs_mask: bool,
) -> None:
    def answer(candidate: Candidate, inputs: Any, options: dict[str, Any]) -> Tensor | None:
        if needs_mask and candidate.declared.mask_required:
            return of_formula(candidate, inputs, Options(), Scores())
        return None

    plain = stub(masked, answer)
    plain.call(plain.probes[0].inputs)
    assert any(given_a_mask([plain])) == needs_mask


@pytest.mark.parametrize(("place", "expected"), [("mine.py, line 7", True), ("", False)])
def test_what_code_of_an_author_raises_is_raised_with_other_projections_too(
    place: str, expected: bool
) -> None:
    """What has no place comes from weights that cannot be loaded, which others may not be."""
    candidates = [stub(masked, lambda *_: None) for _ in range(2)]
    for each in candidates:
        each.calls.raised = Raised("RuntimeError", "RuntimeError: no", place, "")
    assert code_of_each_raises(candidates) == expected
    candidates[1].calls.raised = None
    assert not code_of_each_raises(candidates)


def of_allowed_tokens(candidate: Candidate, inputs: Any, mask: Tensor) -> Tensor:
    """Return the output of each item's allowed tokens on their own, and zeros for the others."""
    output = torch.zeros_like(inputs[0])
    for item, allowed in enumerate(mask[:, 0, 0]):
        rest = inputs[0][item : item + 1, allowed]
        output[item, allowed] = candidate.formula((rest, rest, rest), candidate.weights, None)[0]
    return output


@pytest.mark.parametrize("moves", [True, False])
def test_a_mask_of_padding_that_moves_positions_is_not_judged(moves: bool) -> None:
    def answer(candidate: Candidate, inputs: Any, options: dict[str, Any]) -> Tensor:
        mask = options.get("mask")
        if mask is None or not moves:
            return candidate.formula(inputs, candidate.weights, mask)
        return of_allowed_tokens(candidate, inputs, mask)

    candidate = stub(masked, answer).claiming(cross_attention=False, rotary=Rotary())
    formula = replace(candidate.formula, rotary=Rotary(), causal="top_left")
    candidate = candidate.trying(formula=formula).declaring(mask_shape="b s")
    assert moves_positions(candidate) == moves
    assert not moves_positions(candidate.claiming(rotary=None))


def with_padding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Add a mask, and hide keys of padding."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if attn_mask is not None:
        scores = scores + attn_mask
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
    return scores.softmax(-1) @ v


def test_a_kernel_may_have_a_mask_of_padding_beside_another_one() -> None:
    declared = DeclaredKernel(with_padding, "with_padding", claims={"causal": None})
    found = find_masks(Candidate(declared, explained=True)).declared
    assert (found.mask, found.padding) == ("additive", "drop")
    assert 'padding="drop"' in found.code("with_padding")


def with_flag(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    raise NotImplementedError


def test_forms_of_masks_that_raise_in_causal_calls_are_not_claimed() -> None:
    """As those of `mask & causal`, before a fused kernel that adds other masks."""

    def answer(candidate: Candidate, inputs: Any, options: dict[str, Any]) -> Tensor | None:
        mask, is_causal = options.get("mask"), options.get("is_causal", False)
        if is_causal and mask is not None and mask.is_floating_point():
            return None
        return of_formula(candidate, inputs, Options(mask, is_causal), Scores())

    candidate = stub(with_flag, answer).declaring(mask="keep")
    found = find_causal(candidate.claiming(masks={"bool", "float"}))
    assert set(found.claimed("masks")) == {"bool"}
