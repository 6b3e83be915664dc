"""Scripts of failures need torch and the author's file alone, and pass once that is mended.

Each case is a class, or a function, with a fault, and the line that mends it.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mha.conformance import check
from mha.implementations import from_kernel, from_module
from mha.spec import Claims
from support.alone import Alone
from support.script_sources import (
    ANY_CONFIG,
    CONFIG,
    FUSED,
    HEAD_KERNEL,
    HEADS,
    KERNEL,
    PACKED_KERNEL,
    PLAIN,
    SEQUENCE_FIRST,
)

pytestmark = pytest.mark.usefixtures("undiagnosed")

PATHS = {"w_q": "q_proj", "w_k": "k_proj", "w_v": "v_proj", "w_o": "out_proj"}
# A fault of `PLAIN` for each family: the clause, the line that is wrong, and what stands there
# instead.
FAULTS = {
    "CFG-2": (
        "        if n_heads < 1 or d_model < 1 or d_model % n_heads:",
        "        if n_heads < 1:",
    ),
    "SHP-1": ("        return output, weights", "        return output.squeeze(1), weights"),
    "SHP-2": ("        return output, weights", "        return output, weights.mean(1)"),
    "SMX-1": ("return output, weights", "return output, 2 * weights"),
    "SMX-6": (" / q.shape[-1] ** 0.5", " / q.shape[-1]"),
    "MSK-1": ('masked_fill(~mask, float("-inf"))', "masked_fill(~mask, -1.0)"),
    "MSK-12": (
        "            if mask.dtype != torch.bool or",
        "            if mask.dtype != torch.bool and",
    ),
    "CAU-1": (".triu(1)", ".triu(2)"),
    "PTH-1": ("output = self.out_proj(context)", "output = self.out_proj(context) + need_weights"),
    "PTH-2": ("output = self.out_proj(context)", "output = self.out_proj(context) + self.training"),
    "HED-1": (
        "        weights = scores",
        "        scores = scores + scores.mean(1, keepdim=True)\n        weights = scores",
    ),
    "EQV-1": (
        "output = self.out_proj(context)",
        "output = self.out_proj(context + context.mean(0))",
    ),
    "NUM-1": (
        "        weights = scores",
        "        scores = scores.half().float()\n        weights = scores",
    ),
    "GRD-1": ("(x.repeat_interleave(", "(x.detach().repeat_interleave("),
    "DRP-2": ("self.dropout(weights)", "(weights * (self.dropout(weights) != 0))"),
    "STA-1": ("        def split", "        query.add_(1)\n\n        def split"),
    "CMP-4": (
        "weights = scores.",
        "weights = (scores * (1 + torch.is_autocast_enabled('cpu'))).float().",
    ),
    "GQA-1": ("scores = q @ k.mT", "scores = (1 + (self.kv_heads < self.n_heads)) * q @ k.mT"),
    "XAT-1": (
        "self.v_proj(value)",
        "self.v_proj(value) * self.v_proj.in_features / query.shape[-1]",
    ),
}


@dataclass(frozen=True)
class Convention:
    """A class or a function, and how it is declared; right, wrong: the line, and its fault."""

    clause: str
    source: str
    right: str
    wrong: str
    options: dict[str, Any] = field(default_factory=dict)
    # What the script must say.
    says: tuple[str, ...] = ()
    name: str = "Attention"


SELF = Claims(causal=None, cross_attention=False, returns_weights=False)
OF_SELF: dict[str, Any] = {
    "mask": None,
    "claims": Claims(masks=(), causal=None, cross_attention=False, returns_weights=False),
}
SCALE = " / q.shape[-1] ** 0.5", " / q.shape[-1]"
HIDDEN = 'float("-inf")', "-1.0"
PER_HEAD = ("heads.*.q", "heads.*.k", "heads.*.v")
INTERLEAVED = {"w_qkv": ("qkv", "(r h e) d -> (h r e) d"), "w_o": "proj"}
CONVENTIONS = {
    "fused qkv, drop polarity": Convention(
        "MSK-1",
        FUSED,
        *HIDDEN,
        {"parameters": {"w_qkv": "qkv", "w_o": "proj"}, "mask": "drop", "claims": SELF},
        ("'qkv.weight': ", "attn_mask=attn_mask_"),
    ),
    "fused qkv, by heads, gradients of weights": Convention(
        "GRD-1",
        FUSED.replace("(3, self.num_heads, -1)", "(self.num_heads, 3, -1)").replace(
            "(2, 0, 3, 1, 4)", "(3, 0, 2, 1, 4)"
        ),
        "scores.softmax(-1) @ v)",
        "scores.softmax(-1) @ (v + v.detach()) / 2)",
        {"parameters": INTERLEAVED, "mask": "drop", "claims": SELF},
        (".grad",),
    ),
    "sequence first, keyword only, fixed dropout, mask of padding": Convention(
        "MSK-1",
        SEQUENCE_FIRST,
        *HIDDEN,
        {
            "parameters": {"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o"},
            "mask_shape": "b s",
            "mask_numbers": True,
            "layout": "l b d",
            "claims": Claims(
                causal=None, returns_weights=False, per_head_mask=False, per_query_mask=False
            ),
        },
        (
            "query=query_2.transpose(0, 1)",
            "key_padding_mask=key_padding_mask_2",
            ").transpose(0, 1)",
        ),
    ),
    "a config class, a dict, an additive mask": Convention(
        "MSK-1",
        CONFIG,
        "scores + attention_mask",
        "scores + attention_mask.clamp(min=-1)",
        {
            "parameters": {"w_q": "query", "w_k": "key", "w_v": "value", "w_o": "dense"},
            "mask": "additive",
            "claims": Claims(causal=None, cross_attention=False, masks={"bool", "float"}),
        },
        ("EncoderConfig(hidden_size=", "['hidden_states']"),
    ),
    "any config, weights first": Convention(
        "SMX-1",
        ANY_CONFIG,
        '"attentions": weights,',
        '"attentions": 2 * weights,',
        {
            "parameters": {"w_q": "query", "w_k": "key", "w_v": "value", "w_o": "dense"},
            "mask": "additive",
            "claims": Claims(causal=None, cross_attention=False, masks={"bool", "float"}),
        },
        ("config_1 = types.SimpleNamespace(", "['attentions']"),
    ),
    "a list of heads": Convention(
        "SMX-6",
        HEADS,
        *SCALE,
        {
            "parameters": {**dict(zip(("w_q", "w_k", "w_v"), PER_HEAD, strict=True)), "w_o": "out"},
            **OF_SELF,
        },
        ("'heads.0.q.weight': ",),
    ),
    "a list of heads, gradients of weights": Convention(
        "GRD-1",
        HEADS,
        "self.q(x), self.k(x), self.v(x)",
        "self.q(x), self.k(x), (self.v(x) + self.v(x).detach()) / 2",
        {
            "parameters": {**dict(zip(("w_q", "w_k", "w_v"), PER_HEAD, strict=True)), "w_o": "out"},
            **OF_SELF,
        },
    ),
    "a kernel": Convention(
        "MSK-1",
        KERNEL,
        *HIDDEN,
        {"layout": "b l h d", "claims": Claims(causal=None, returns_weights=False)},
        ("attend(q=q_2, k=k_2, v=v_2, attn_mask=attn_mask_2)",),
        name="attend",
    ),
    "a kernel, three tensors and one call": Convention(
        "SMX-6",
        KERNEL,
        *SCALE,
        {"layout": "b l h d", "claims": Claims(causal=None, returns_weights=False)},
        ("\nq_2 = tensor(",),
        name="attend",
    ),
    "a kernel, gradients": Convention(
        "GRD-1",
        KERNEL,
        "scores.softmax(-1), v)",
        "scores.softmax(-1), (v + v.detach()) / 2)",
        {"layout": "b l h d", "claims": Claims(causal=None, returns_weights=False)},
        ("q_2 = query_2.unflatten(2, (-1, 1))", "value_2.grad"),
        name="attend",
    ),
    "a kernel of one head": Convention(
        "SMX-6",
        HEAD_KERNEL,
        *SCALE,
        {"layout": "l d", "mask": None},
        ("for i in range(len(q_2))",),
        name="attend",
    ),
    "a kernel of one tensor": Convention(
        "SMX-6",
        PACKED_KERNEL,
        *SCALE,
        {"layout": "b l 3 h d", **OF_SELF},
        ("attend(torch.stack((q_2, k_2, v_2), 2))",),
        name="attend",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder of modules, which are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # that of another test
    yield tmp_path
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    """Return what runs scripts without this package."""
    runner = Alone()
    yield runner
    runner.close()


def script_of(folder: Path, case: Convention) -> str:
    """Return the script of the failure of a case."""
    assert case.source.count(case.right) >= 1
    (folder / "mine.py").write_text(case.source.replace(case.right, case.wrong))
    made = getattr(importlib.import_module("mine"), case.name)
    adapt: Any = from_kernel if case.name == "attend" else from_module
    (verdict,) = check(
        adapt(made, **case.options), "quick", clauses=case.clause, dtypes="float32"
    ).verdicts
    assert verdict.status == "fail", verdict
    assert verdict.script
    return verdict.script


def fails_until_mended(folder: Path, case: Convention, script: str, alone: Alone) -> None:
    """Require that a script fails by its assertion where this package is missing, then passes."""
    (folder / "script.py").write_text(script)
    found = alone.run(folder / "script.py")
    assert found.startswith("AssertionError"), (found, script)
    (folder / "mine.py").write_text(case.source)
    # A file of the same size, written within the same second, would be read from the bytecode of
    # the wrong one.
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    assert alone.run(folder / "script.py") == "passes", script


def families() -> Iterator[Any]:
    for clause, (right, wrong) in FAULTS.items():
        # The first property of GQA-1, of gradients, has no script.
        claims = Claims(
            dropout=True,
            grouped_query=True,
            kv_widths=True,
            composes={"autocast"},
            gradients=clause != "GQA-1",
        )
        yield pytest.param(
            Convention(clause, PLAIN, right, wrong, {"parameters": PATHS, "claims": claims}),
            id=clause,
        )


@pytest.mark.mostly_slow(4)
@pytest.mark.parametrize("case", list(families()))
def test_script_of_each_family_needs_the_file_alone(
    case: Convention, folder: Path, alone: Alone
) -> None:
    fails_until_mended(folder, case, script_of(folder, case), alone)


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("which", CONVENTIONS)
def test_script_uses_the_conventions_of_the_author(which: str, folder: Path, alone: Alone) -> None:
    case = CONVENTIONS[which]
    script = script_of(folder, case)
    for text in case.says:
        assert text in script
    fails_until_mended(folder, case, script, alone)


def test_script_ends_with_the_error_of_the_class(folder: Path, alone: Alone) -> None:
    wrong = (
        "if query.shape[1] != key.shape[1]:\n            raise RuntimeError('L != S')\n\n       "
        " def split"
    )
    case = Convention("SHP-1", PLAIN, "def split", wrong, {"parameters": PATHS})
    (folder / "script.py").write_text(script_of(folder, case))
    assert alone.run(folder / "script.py") == "RuntimeError: L != S"
    (folder / "mine.py").write_text(PLAIN)
    assert alone.run(folder / "script.py") == "passes"


def test_script_finds_an_inferred_class_in_a_file_of_any_name(folder: Path, alone: Alone) -> None:
    file = folder / "my attention-2.py"
    file.write_text(FUSED)
    (verdict,) = check(f"{file}:Attention", "quick", clauses="CFG-2", dtypes="float32").verdicts
    (folder / "script.py").write_text(str(verdict.script))
    assert alone.run(folder / "script.py").startswith("AssertionError")
    check_of_sizes = "if dim % num_heads:\n            raise ValueError(f'{dim} {num_heads}')"
    fixed = FUSED.replace(
        "        self.num_heads =", f"        {check_of_sizes}\n        self.num_heads ="
    )
    file.write_text(fixed)
    assert alone.run(folder / "script.py") == "passes"


def call(target: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    return target(query, key, value, mask=options["mask"], is_causal=options["is_causal"])


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        (PLAIN, {"call": call}, "its declaration calls it with a function of its own, call=..."),
        (f"import mha.spec\n{PLAIN}", {}, "mine.py imports it"),
    ],
)
def test_script_that_needs_this_package_says_why(
    source: str, options: Any, reason: str, folder: Path
) -> None:
    script = script_of(
        folder, Convention("SMX-6", source, *FAULTS["SMX-6"], {"parameters": PATHS, **options})
    )
    assert f"\n# This script needs mha-conformance: {reason}.\n" in script
