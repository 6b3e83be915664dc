"""`judge_output`: right outputs are right, wrong ones are named, and nothing else happens."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from mha.conformance import judge_output
from mha.conformance.embedded import call as calls
from mha.conformance.embedded.call import USUAL, Call, blocks
from mha.conformance.embedded.layouts import Layout
from mha.conformance.embedded.solving import Rows, rows_of
from mha.spec import Alibi, Claims, Config, Lse, Options, Problem, Weights, oracle
from mha.spec.bounds import Ball

Inputs = tuple[Tensor, Tensor, Tensor]
TOP_LEFT = USUAL
BOTTOM_RIGHT = replace(USUAL, causal="bottom_right")


def inputs_of(
    dtype: torch.dtype = torch.float32, d: int = 8, d_v: int = 0, S: int = 13, L: int = 7
) -> Inputs:
    """Query, key and value of 2 items and 4 heads, of which two share a key."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, L, d), (2, 2, S, d), (2, 2, S, d_v or d))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return (2 * query).to(dtype), key.to(dtype), value.to(dtype)


def mask_of(form: str) -> Tensor:
    """A mask (2, 1, 7, 13) whose last row is empty, boolean or added."""
    allowed = torch.rand(2, 1, 7, 13, generator=torch.Generator().manual_seed(1)) < 0.6
    allowed[:, :, -1] = False
    if form == "bool":
        return allowed
    added = torch.randn(2, 1, 7, 13, generator=torch.Generator().manual_seed(2))
    return added.masked_fill(~allowed, -math.inf)


SINKS = (0.0, 1.0, -math.inf, 3.0)
SLOPES = (0.5, 0.25, 0.125, 1.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"is_causal": True},
    "window": {"window": (3, 1)},
    "causal window": {"window": (2, None), "is_causal": True},
    "softcap": {"softcap": 1.5, "mask": mask_of("float")},
    "sinks": {"sinks": SINKS, "mask": mask_of("bool")},
    "slopes": {"alibi": SLOPES, "mask": mask_of("float")},
    "mask": {"mask": mask_of("bool"), "is_causal": True},
    "key mask": {"mask": mask_of("bool")[0, 0, 2]},
}


def right_of(inputs: Inputs, options: dict[str, Any], claims: Claims) -> tuple[Tensor, Tensor]:
    """Context and log-sum-exp by the formula that wrong answers start from, a head at a time."""
    call = Call.of(inputs, options, claims)
    context = torch.empty(call.context_shape(), dtype=torch.float64)
    lse = torch.empty(context.shape[:3], dtype=torch.float64)
    for item in range(context.shape[0]):
        for head in range(context.shape[1]):
            rows = rows_of(call, item, head, range(context.shape[2]))
            context[item, head], lse[item, head] = rows.context(), rows.lse().squeeze(-1)
    return context.to(inputs[0].dtype), lse.float()


def of_contract(inputs: Inputs, options: dict[str, Any]) -> Problem:
    """The same call as a problem of the contract."""
    query, _, value = inputs
    config = Config(
        d_model=4 * query.shape[-1],
        n_heads=4,
        n_kv_heads=2,
        kdim=2 * query.shape[-1],
        vdim=2 * value.shape[-1],
        projected=False,
        d_value=value.shape[-1],
    )
    laid_out = (x.transpose(1, 2).flatten(2) for x in inputs)
    weights = Weights.identity(config, query.dtype, "cpu")
    return Problem(config, weights, *laid_out, options=Options(**options))


@pytest.mark.parametrize("chunk", [1 << 18, 40])
@pytest.mark.parametrize("claims", [TOP_LEFT, BOTTOM_RIGHT], ids=["top_left", "bottom_right"])
@pytest.mark.parametrize("name", OPTIONS)
def test_blocks_are_the_oracle(
    name: str, claims: Claims, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CHUNK", chunk)
    monkeypatch.setattr(calls, "MOST_OF_KEYS", chunk * 20)
    inputs, options = inputs_of(d_v=6), OPTIONS[name]
    expected = oracle(of_contract(inputs, options), claims)
    call = Call.of(inputs, options, claims)
    context = expected.context.rearranged(lambda x: x.unflatten(2, (4, 6)).transpose(1, 2))
    seen = 0
    for block in blocks(call, call.rows):
        for own, whole in ((block.context, context), (block.lse, expected.lse)):
            grouped = whole.rearranged(call.of_groups)
            part = grouped[block.items, block.heads, block.group]
            part = part[:, :, :, block.rows]
            torch.testing.assert_close(own.mid, part.mid, rtol=1e-12, atol=1e-12)
            assert bool((own.rad <= 4 * part.rad + 1e-12).all())
            assert bool((part.rad <= 4 * own.rad + 1e-12).all())
        seen += block.lse.mid.numel()
    assert seen == 2 * 4 * 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_right_outputs_are_right(name: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(dtype)
    for claims in (TOP_LEFT, BOTTOM_RIGHT):
        verdict = judge_output(
            inputs, right_of(inputs, OPTIONS[name], claims), OPTIONS[name], claims=claims
        )
        assert verdict.ok, verdict.text
        assert verdict.judged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_of_torch_are_right(dtype: torch.dtype) -> None:
    inputs = inputs_of(dtype, d=32, L=40, S=90)
    for backend in (
        torch.nn.attention.SDPBackend.MATH,
        torch.nn.attention.SDPBackend.FLASH_ATTENTION,
    ):
        with torch.nn.attention.sdpa_kernel(backend):
            output = sdpa(*inputs, enable_gqa=True)
        verdict = judge_output(inputs, output)
        assert verdict.ok, verdict.text


def changed(name: str, inputs: Inputs) -> Tensor:  # noqa: PLR0911  one for each
    """A context of which this is wrong."""
    q, k, v = inputs
    right = sdpa(q, k, v, enable_gqa=True)
    if name == "mean":
        return v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(right).clone()
    if name == "every second key":
        return sdpa(q, k[:, :, ::2], v[:, :, ::2], enable_gqa=True)
    if name == "last 16 keys":
        return sdpa(q, k[:, :, :-16], v[:, :, :-16], enable_gqa=True)
    if name == "scale":
        return sdpa(q, k, v, enable_gqa=True, scale=1.1 * q.shape[-1] ** -0.5)
    if name == "head":
        return right.roll(1, 1)
    if name == "order":
        return right.flip(-1)
    if name == "columns":
        width = q.shape[-1] // 2
        return sdpa(q[..., :width], k[..., :width], v, enable_gqa=True, scale=q.shape[-1] ** -0.5)
    if name == "causal":
        return sdpa(q, k, v, enable_gqa=True, is_causal=True)
    if name == "mapping":
        return sdpa(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
    if name == "some zeros":
        rows = torch.arange(q.shape[2]).view(-1, 1)
        return right.masked_fill(rows < 3, 0.0)
    return {"zeros": 0 * right, "half": right / 2}[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zeros", "the output is zeros"),
        ("some zeros", "some rows of the output are zeros"),
        ("mean", "the output is the mean of the values"),
        ("every second key", "only every second key was read"),
        ("last 16 keys", "the last 16 keys were left out"),
        ("scale", "the scores are 1.1 times what they should be"),
        ("head", "the output is that of the previous head"),
        ("order", "the numbers of each row are right, but in another order"),
        ("columns", "the scores leave out the last 16 of 32 columns"),
        ("causal", "the causal mask was applied, though none was asked for"),
        ("mapping", "query head h reads the key head h mod H_kv"),
        ("half", "the output is 0.5 times what it should be"),
    ],
)
def test_wrong_contexts_have_a_cause(name: str, words: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(dtype, d=32, L=40, S=80)
    verdict = judge_output(inputs, changed(name, inputs), claims=TOP_LEFT)
    assert not verdict.ok
    assert words.split(" 1.1 ")[0] in verdict.cause, verdict.text


@pytest.mark.parametrize(
    ("asked", "done", "words"),
    [
        ({"is_causal": True}, {}, "the causal mask was not applied"),
        ({"window": (3, 1)}, {"window": (4, 1)}, "one key too many before"),
        ({"window": (3, 1)}, {"window": (3, 0)}, "one key too few after"),
        ({"window": (3, 1)}, {"window": (1, 3)}, "its sides exchanged"),
        ({"softcap": 1.5}, {}, "the softcap has no effect"),
        ({"sinks": SINKS}, {}, "the sink has no effect"),
        ({"alibi": SLOPES}, {}, "the slopes of ALiBi have no effect"),
        ({"alibi": SLOPES}, {"alibi": [-s for s in SLOPES]}, "the opposite sign"),
        ({"scale": 0.7}, {}, "the scale of the call has no effect"),
        ({"mask": mask_of("bool")}, {}, "the mask was not applied"),
    ],
)
def test_other_options_have_a_cause(
    asked: dict[str, Any], done: dict[str, Any], words: str
) -> None:
    inputs = inputs_of()
    output, _ = right_of(inputs, done, BOTTOM_RIGHT)
    verdict = judge_output(inputs, output, asked, claims=BOTTOM_RIGHT)
    assert words in verdict.cause, verdict.text


def test_another_alignment_has_a_cause() -> None:
    inputs, options = inputs_of(), {"is_causal": True}
    output, _ = right_of(inputs, options, TOP_LEFT)
    verdict = judge_output(inputs, output, options, claims=BOTTOM_RIGHT)
    assert verdict.cause == "causal mask and window are aligned top_left instead of bottom_right"
    with pytest.raises(ValueError, match="top_left or bottom_right"):
        judge_output(inputs, output, options)


def test_a_log_sum_exp_is_judged_in_its_base_and_layout() -> None:
    inputs, options = inputs_of(), OPTIONS["sinks"]
    context, lse = right_of(inputs, options, TOP_LEFT)
    assert bool((lse[:, 2, -1] == -math.inf).all())
    assert judge_output(inputs, (context, lse), options).ok
    in_base_2 = lse / math.log(2)
    verdict = judge_output(inputs, (context, in_base_2), options)
    assert verdict.cause == "the log-sum-exp is to the base 2, not e"
    claims = replace(TOP_LEFT, lse=Lse(base="2", layout="b l h"))
    assert judge_output(inputs, (context, in_base_2.transpose(1, 2)), options, claims=claims).ok
    finite = lse.clamp(min=-1e9)
    verdict = judge_output(inputs, (context, finite), options)
    assert "lse[0, 2, 6] is -1e+09, should be -inf" in verdict.text
    undefined = replace(TOP_LEFT, lse=Lse(empty="undefined"))
    assert judge_output(inputs, (context, finite), options, claims=undefined).ok


@pytest.mark.parametrize("policy", ["zeros", "nan", "uniform"])
def test_empty_rows_are_as_claimed(policy: Any) -> None:
    inputs, options = inputs_of(), {"mask": mask_of("bool")}
    context, _ = right_of(inputs, options, TOP_LEFT)
    if policy == "nan":
        context[:, :, -1] = math.nan
    elif policy == "uniform":
        context[:, :, -1] = inputs[2].mean(2).repeat_interleave(2, 1)
    for claimed in ("zeros", "nan", "uniform"):
        claims = replace(TOP_LEFT, empty_row=claimed)
        assert judge_output(inputs, context, options, claims=claims).ok == (claimed == policy)


def test_the_first_nan_is_named() -> None:
    inputs = inputs_of()
    context, _ = right_of(inputs, {}, TOP_LEFT)
    context[1, 2, 3, 4:6] = math.nan
    context[0, 1, 2, 3] += 1
    verdict = judge_output(inputs, context)
    assert "2 are NaN, the first one is context[1, 2, 3, 4] is nan" in verdict.text
    assert "first: context[0, 1, 2, 3]" in verdict.text
    assert verdict.share_wrong == 3 / context.numel()
    data = json.loads(verdict.to_json())
    assert data["results"][0]["first_nan"]["got"] == "nan"


def test_undefined_rows_may_hold_anything() -> None:
    inputs = inputs_of()
    context, _ = right_of(inputs, {}, TOP_LEFT)
    context[1, :, 5:] = math.nan
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[1, 5:] = False
    verdict = judge_output(inputs, context, valid=valid)
    assert verdict.ok, verdict.text
    assert verdict.results[0].unknown == 4 * 2 * 8


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (None, "the context is NoneType, not a tensor"),
        (torch.zeros(2, 4, 7), "the context has the shape (2, 4, 7), not 'b h l d'"),
        (torch.zeros(2, 4, 7, 9), "has the shape (2, 4, 7, 9), but should have (2, 4, 7, 8)"),
        (torch.zeros(2, 4, 7, 8).bfloat16(), "has the dtype torch.bfloat16"),
        ((torch.zeros(2, 4, 7, 8), torch.zeros(2, 7, 4)), "the lse has the shape (2, 7, 4)"),
        ((), "0 results"),
    ],
)
def test_what_is_no_result_is_refused(output: object, words: str) -> None:
    verdict = judge_output(inputs_of(), output)
    assert words in verdict.refused
    assert verdict.share_wrong == 1


@pytest.mark.parametrize("layout", ["b l h d", "(b h) l d", "b l (h d)", "b h l d -> b l (h d)"])
def test_layouts(layout: str) -> None:
    inputs = inputs_of()
    context, lse = right_of(inputs, {}, TOP_LEFT)
    of_inputs, _, of_context = layout.partition("->")
    laid_out = [Layout.read(of_inputs).from_contract(x) for x in inputs]
    output = Layout.read(of_context.strip() or of_inputs).from_contract(context)
    assert judge_output(laid_out, (output, lse), layout=layout, heads=4).ok
    names = dict(zip(("query", "key", "value"), laid_out, strict=True))
    assert not judge_output(names, 0 * output, layout=layout, heads=4).ok


def test_nothing_else_is_changed_or_read() -> None:
    """Arguments, versions and settings stay; settings change no verdict."""
    inputs = tuple(x.requires_grad_() for x in inputs_of(torch.bfloat16, d=32, L=40, S=80))
    output = changed("scale", tuple(x.detach() for x in inputs))
    copies = [x.detach().clone() for x in (*inputs, output)]
    plain = judge_output(inputs, output)
    verdicts = []
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            verdicts.append(judge_output(inputs, output))
        with torch.device("meta"):
            verdicts.append(judge_output(inputs, output))
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() == torch.float64
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(before)
    assert verdicts == [plain, plain]
    for x, copied in zip((*inputs, output), copies, strict=True):
        assert torch.equal(x, copied)
        assert x._version == 0
        assert x.grad is None


@pytest.mark.parametrize(("L", "S"), [(0, 5), (5, 0), (1, 1)])
def test_empty_sizes(L: int, S: int) -> None:
    inputs = inputs_of(torch.bfloat16, L=L, S=S)
    context = torch.zeros(2, 4, L, 8, dtype=torch.bfloat16)
    if S == 1:
        context = inputs[2].repeat_interleave(2, 1)
    assert judge_output(inputs, context).ok


def test_some_rows_may_be_judged_alone() -> None:
    inputs = inputs_of(L=100, S=100)
    context, _ = right_of(inputs, {}, TOP_LEFT)
    verdict = judge_output(inputs, context, most_rows=10)
    assert verdict.results[0].elements == 2 * 4 * 10 * 8
    context[0, 0, -1] += 1
    assert not judge_output(inputs, context, most_rows=10).ok


def test_inputs_that_do_not_fit_are_refused() -> None:
    query, key, value = inputs_of()
    with pytest.raises(ValueError, match="H a multiple of H_kv"):
        judge_output((query, key[:, :, :5], value), query)
    with pytest.raises(ValueError, match="for each of 4 heads"):
        judge_output((query, key, value), query, {"sinks": (1.0,)})


def test_a_small_defect_within_the_bound_is_found_in_half_precision() -> None:
    inputs = inputs_of(torch.bfloat16, d=32, L=40, S=80)
    query, key, value = inputs
    output = sdpa(query, key, value, enable_gqa=True, scale=1.01 * 32**-0.5)
    verdict = judge_output(inputs, output)
    assert not verdict.results[0].wrong
    assert not verdict.ok
    assert judge_output(inputs, output, directed=False).ok


@pytest.mark.parametrize("name", ["sinks", "alibi"])
def test_a_small_defect_of_sinks_and_slopes_is_found_in_half_precision(name: str) -> None:
    inputs = inputs_of(torch.bfloat16, d=32, L=40, S=700)
    asked = {"sinks": {"sinks": (5.0, 4.0, 6.0, 5.0)}, "alibi": {"alibi": (2.0**-9,) * 4}}[name]
    right, _ = right_of(inputs, asked, BOTTOM_RIGHT)
    assert judge_output(inputs, right, asked, claims=BOTTOM_RIGHT).ok
    wrong, _ = right_of(inputs, {}, BOTTOM_RIGHT)
    verdict = judge_output(inputs, wrong, asked, claims=BOTTOM_RIGHT)
    assert "the context is as if" in verdict.directed, verdict.text


def test_contexts_of_symmetric_slopes() -> None:
    inputs, options = inputs_of(), {"alibi": SLOPES}
    claims = replace(TOP_LEFT, scores=replace(USUAL.scores, alibi=Alibi("symmetric")))
    output, _ = right_of(inputs, options, claims)
    assert judge_output(inputs, output, options, claims=claims).ok
    assert not judge_output(inputs, output, options, claims=TOP_LEFT).ok


def test_rows_agree_with_the_oracle() -> None:
    """The formula of the causes is not that of the oracle, and agrees with it."""
    inputs = inputs_of()
    expected: Ball = oracle(of_contract(inputs, {}), TOP_LEFT).context
    rows: Rows = rows_of(Call.of(inputs, {}, None), 1, 3, range(7))
    torch.testing.assert_close(rows.context(), expected.mid[1, :, 24:])


def test_a_scale_of_0_is_judged_in_half_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 8, generator=generator).bfloat16().unbind()
    mean = v.float().mean(2, keepdim=True).expand(v.shape).to(v.dtype)
    assert judge_output((q, k, v), mean, {"scale": 0.0}).ok
    assert not judge_output((q, k, v), 1.05 * mean, {"scale": 0.0}).ok
