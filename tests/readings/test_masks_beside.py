"""Masks that act only beside others, masks without an effect, and those that calls require."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mha.implementations import ImplementationError, from_kernel
from mha.implementations.inference import mask_search
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.kernels import infer_kernel
from mha.implementations.inference.mask_search import Ambiguous, find_masks
from mha.implementations.inference.projections import Unclear
from mha.spec import Claims, Config, Options, Scores, Weights
from support.judging import expect_pass
from support.readings import findings
from support.stubs import Answer, of_formula, stub


def of_pair(q: Tensor, k: Tensor, v: Tensor, q_mask: Any = None, kv_mask: Any = None) -> Tensor:
    raise NotImplementedError


def of_guess(q: Tensor, k: Tensor, v: Tensor, special_mask: Any = None) -> Tensor:
    raise NotImplementedError


def acting(*, in_pairs: bool) -> Answer:
    """Return the answers of a kernel whose masks of keys act in pairs, or not at all."""

    def answer(candidate: Any, inputs: Any, options: dict[str, Any]) -> Tensor | None:
        declared, mask = candidate.declared, options.get("mask")
        if mask is not None and (declared.mask_shape != "b s" or declared.mask_numbers):
            return None
        acts = in_pairs and declared.beside == {"q_mask": "b l"}
        given = mask if acts and declared.mask == "keep" else None
        return of_formula(candidate, inputs, Options(mask=given), Scores())

    return answer


def test_masks_that_act_in_pairs_are_given_in_pairs() -> None:
    found = find_masks(stub(of_pair, acting(in_pairs=True)))
    assert (found.declared.mask, found.declared.mask_shape) == ("keep", "b s")
    assert found.declared.beside == {"q_mask": "b l"}
    assert not found.assumed


def test_mask_is_not_said_to_be_ignored_while_another_one_is_left_out() -> None:
    with pytest.raises(Unclear, match="kv_mask has no effect while q_mask is None"):
        find_masks(stub(of_pair, acting(in_pairs=False)))


def test_guessed_mask_without_effect_is_not_claimed() -> None:
    found = find_masks(stub(of_guess, acting(in_pairs=False)))
    assert found.claims["masks"] == ()
    assert found.declared.mask is None


def test_pair_is_declared() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, q_mask: Any = None, kv_mask: Any = None) -> Tensor:
        given.append((q_mask, kv_mask))
        return v

    given = list[Any]()
    claims = Claims(causal=None, per_head_mask=False, per_query_mask=False, returns_weights=False)
    implementation = from_kernel(
        attend, mask="drop", mask_shape="b s", beside={"q_mask": "b l"}, claims=claims
    )
    config, x = Config(d_model=4, n_heads=2), torch.zeros(3, 5, 4)
    attention = implementation.build(
        config, Weights.random(config, 0), dtype=torch.float32, device="cpu"
    )
    keep = torch.tensor([True] * 4 + [False])
    attention(x, x, x, mask=keep)
    q_mask, kv_mask = given[-1]
    assert torch.equal(q_mask, torch.zeros(3, 5, dtype=torch.bool))
    assert torch.equal(kv_mask, ~keep.expand(3, 5))
    attention(x, x, x)
    assert given[-1] == (None, None)


def test_name_beside_a_mask_must_be_a_parameter() -> None:
    with pytest.raises(ImplementationError, match="beside names other_mask, but its parameters"):
        from_kernel(of_pair, mask_shape="b s", beside={"other_mask": "b l"})


def hidden(Q: Tensor, K: Tensor, V: Tensor, attn_mask: Tensor) -> tuple[Tensor, Tensor]:
    """As in many tutorials: each call gives a mask, of what is hidden."""
    scores = Q @ K.mT * Q.shape[-1] ** -0.5
    scores.masked_fill_(attn_mask, -1e9)
    weights = scores.softmax(-1)
    return weights @ V, weights


def added(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT * key.shape[-1] ** -0.5 + attn_mask, -1) @ value


def subtracted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The mask is of ones and zeros, (B, S)."""
    return (q @ k.mT * k.shape[-1] ** -0.5 - (1 - mask[:, None, None]) * 1e9).softmax(-1) @ v


@pytest.mark.parametrize(
    ("kernel", "convention", "shape"),
    [(hidden, "drop", None), (added, "additive", None), (subtracted, "keep", "b s")],
)
def test_mask_that_a_kernel_requires_is_found(
    kernel: Any, convention: str, shape: str | None
) -> None:
    result = infer_kernel(kernel)
    assert "required in each call" in findings(result)["mask"]
    assert "mask_required=True" in result.declaration
    masks = result.implementation.call.masks  # type: ignore[attr-defined]  # it is one by name
    assert (masks.convention, masks.shape, masks.required) == (convention, shape, True)


def test_context_is_told_from_weights_by_the_width_of_the_values() -> None:
    """With as many keys as columns of a head, the weights have the shape of the query."""
    claims = Claims(masks={"bool"}, value_width=True)
    implementation = from_kernel(hidden, mask="drop", mask_required=True, claims=claims)
    config = Config(d_model=6, n_heads=2, d_value=5)
    attention = implementation.build(
        config, Weights.random(config, 0), dtype=torch.float32, device="cpu"
    )
    x = torch.zeros(1, 3, 6)
    result = attention(x, x, x)
    assert result.weights.shape == (1, 2, 3, 3)


def of_graph(q: Tensor, k: Tensor, v: Tensor, adj: Tensor) -> Tensor:
    scores = q @ k.mT * k.shape[-1] ** -0.5
    return torch.where(adj.unsqueeze(1) > 0, scores, -9e15).softmax(-1) @ v


def of_letters(q: Tensor, k: Tensor, v: Tensor, M: Tensor | None = None) -> Tensor:
    scores = q @ k.mT * k.shape[-1] ** -0.5
    return (scores if M is None else scores + M).softmax(-1) @ v


@pytest.mark.parametrize(
    ("kernel", "said"), [(of_graph, "adj: True or 1 = may attend"), (of_letters, "M: added to")]
)
def test_mask_of_another_name_is_known(kernel: Any, said: str) -> None:
    assert findings(infer_kernel(kernel))["mask"].startswith(said)


def of_one_axis(q: Tensor, k: Tensor, v: Tensor, valid_lens: Tensor | None = None) -> Tensor:
    """(B, L, d), with a number of keys for each query, as in d2l."""
    scores = torch.bmm(q, k.mT) * k.shape[-1] ** -0.5
    if valid_lens is not None:
        assert valid_lens.shape == q.shape[:2]
        beyond = torch.arange(k.shape[1]) >= valid_lens[..., None]
        scores = scores.masked_fill(beyond, -1e6)
    return scores.softmax(-1) @ v


def of_choice(q: Tensor, k: Tensor, v: Tensor, mask: str = "none") -> Tensor:
    """The mask is chosen by its name."""
    scores = q @ k.mT * k.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & (mask == "causal")
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def test_lengths_of_merged_heads_are_read() -> None:
    result = infer_kernel(of_one_axis)
    assert 'mask_shape="(b h) l",\n    layout="(b h) l d",' in result.declaration
    expect_pass(result, "MSK-1", also=("MSK-2",))


def test_word_is_no_mask() -> None:
    result = infer_kernel(of_choice)
    assert findings(result)["mask"] == "none"
    assert findings(result)["not judged"] == "mask"


@pytest.mark.parametrize(("problem", "takes_no_mask"), [(Ambiguous, False), (Unclear, True)])
def test_masks_of_two_readings_are_masks(
    problem: type[Unclear], takes_no_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a class is not read as self-attention, whose masks may be of another shape."""

    def ask(candidate: Candidate) -> Candidate:
        raise Ambiguous("either", candidate) if problem is Ambiguous else Unclear("neither")

    def others(candidate: Candidate, *, takes_no_mask: bool) -> list[Candidate]:
        seen.append(takes_no_mask)
        return []

    seen = list[bool]()
    monkeypatch.setattr(mask_search, "_with_masks", ask)
    monkeypatch.setattr(mask_search, "_other_readings", others)
    with pytest.raises(problem):
        find_masks(stub(added, acting(in_pairs=False)))
    assert seen == [takes_no_mask]
