"""Classes in the style of published decoders are understood, conform, and fail with a fault."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor, nn

from mha.implementations.adapters.module import ModuleImplementation
from mha.implementations.inference.infer import Inference, infer
from support.folders import CLASSES
from support.judging import expect_pass, judged
from support.readings import findings

GIVEN = "rotary, half-split, by what each call is given"
OF_EACH_HEAD = "queries and keys, root mean square of each head"
# What is found of each: its positions, and its norm.
FOUND = {
    "Llama": ("rotary, half-split, base 500000", ""),
    "GivenTables": (GIVEN, ""),
    "Qwen3": (GIVEN, f"{OF_EACH_HEAD}, eps 1e-05"),
    "Gemma3": (
        "rotary, half-split, base 1e+06",
        f"{OF_EACH_HEAD}, times 1 + weight, eps 1e-06",
    ),
    "Nanochat": (f"{GIVEN}, turned the other way", f"{OF_EACH_HEAD}, eps that of the dtype"),
    "MiniMind": (GIVEN, ""),
    "NeoX": ("rotary, half-split, base 10000, a quarter of each head", ""),
    "GPTJ": ("rotary, interleaved, base 10000, half of each head", ""),
    "OLMo2": (GIVEN, "queries and keys, root mean square of all heads, eps 1e-06"),
    "ComplexLlama": ("rotary, interleaved, by what each call is given", ""),
    "ViT": ("", "queries and keys, layer norm of each head, eps 1e-05"),
}


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("decoders", CLASSES / "decoders.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["decoders"] = module
    spec.loader.exec_module(module)
    return module


DECODERS = _loaded()


def understood(name: str) -> Inference:
    """Return what is inferred of a class, whose positions and norm must be as expected."""
    result = infer(getattr(DECODERS, name))
    found = findings(result)
    assert (found.get("positions", ""), found.get("norm", "")) == FOUND[name]
    return result


def clauses_of(name: str) -> list[str]:
    """Return the clauses that a rotation or a norm makes true or not."""
    positions, norm = FOUND[name]
    return [clause for clause, found in (("ROT-1", positions), ("QKN-1", norm)) if found]


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", FOUND)
def test_decoder_is_understood_and_conforms(name: str) -> None:
    expect_pass(understood(name), "HED-1", "CAU-2", "MSK-3", *clauses_of(name))


@pytest.mark.parametrize(
    ("name", "positions"), [("MaskedLlama", FOUND["Llama"][0]), ("MaskedTables", GIVEN)]
)
def test_decoder_with_a_required_mask_is_understood(name: str, positions: str) -> None:
    found = findings(infer(getattr(DECODERS, name)))
    assert found["positions"] == positions
    assert found["mask"].endswith("required in each call")


def keys_not_turned(cls: type[nn.Module]) -> type[nn.Module]:
    class KeysNotTurned(cls):  # type: ignore[valid-type, misc]  # a class of the file
        def turn(self, x: Tensor, *rest: Any) -> Any:
            return x if rest[-1] == "k" else super().turn(x, *rest)

    return KeysNotTurned


def keys_not_normed(cls: type[nn.Module]) -> type[nn.Module]:
    class KeysNotNormed(cls):  # type: ignore[valid-type, misc]  # a class of the file
        def norm(self, x: Tensor, role: str) -> Any:
            return 1.5 * x if role == "k" else super().norm(x, role)

    return KeysNotNormed


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", FOUND)
def test_planted_fault_fails(name: str) -> None:
    """The declaration of the right class, with the class of a fault."""
    right = understood(name).implementation
    plants = {"ROT-1": keys_not_turned, "QKN-1": keys_not_normed}
    assert isinstance(right, ModuleImplementation)
    for clause in clauses_of(name):
        wrong = replace(right, constructor=plants[clause](getattr(DECODERS, name)))
        (verdict,) = judged(wrong, [clause]).verdicts
        assert verdict.status in ("fail", "blocked"), verdict
