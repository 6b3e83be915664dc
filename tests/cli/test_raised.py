"""Errors of an author's code are shown with file and line; what is missing, with what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mha.conformance import check
from mha.implementations import ImplementationError, resolve
from mha.implementations.discovery.raised import Raised, main_one, needs_of, place_of
from support.command import run_check as run

HEAD = """

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Base(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def attend(self, query, key, value):
        layers = ((self.q, query), (self.k, key), (self.v, value))
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f, x in layers)
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))

    def core(self, q, k, v):
        return scaled_dot_product_attention(q, k, v)

    def forward(self, query, key, value):
        return self.attend(query, key, value)


"""


def refusal(folder: Path, code: str, name: str) -> str:
    """Return why an object of a file is refused, in one line."""
    file = folder / "mine.py"
    file.write_text(HEAD + code)
    with pytest.raises(ImplementationError) as raised:
        resolve(f"{file}:{name}")
    assert "\n" not in str(raised.value)
    return str(raised.value)


FRAMES = "mine.py, line 23 in forward, line 17 in attend, line 28 in core: "


def of_core(line: str) -> str:
    return f"class A(Base):\n    def core(self, q, k, v):\n        {line}\n"


# The code of an attention, and why it is refused; a declaration is suggested where one would help.
REFUSED = {
    "a name": (
        of_core("return scaled(q, k, v)"),
        (
            "A cannot be judged: each call raises NameError: name 'scaled' is not defined "
            f"({FRAMES}`return scaled(q, k, v)`)"
        ),
    ),
    "shapes": (
        of_core("return (q @ k).softmax(-1) @ v"),
        (
            "A cannot be judged: each call raises RuntimeError: Expected size for first two"
            f" dimensions of batch2 tensor to be: [6, 16] but got: [6, 6]. ({FRAMES}`return (q @"
            " k).softmax(-1) @ v`)"
        ),
    ),
    "an error that other dtypes share": (
        of_core("return self.weigh(q @ torch.zeros(16, 16), k, v)"),
        (
            "A cannot be judged: each call raises AttributeError: 'A' object has no attribute"
            f" 'weigh' ({FRAMES}`return self.weigh(q @ torch.zeros(16, 16), k, v)`)"
        ),
    ),
    "a method of a mask": (
        (
            "class A(Base):\n    def forward(this, x, mask=None):\n        return this.attend(x, x,"
            " x if mask is None else x.hidden(mask))\n"
        ),
        (
            "A cannot be judged as it is: each call with a mask raises AttributeError: 'Tensor'"
            " object has no attribute 'hidden' (mine.py, line 28 in forward: `return this.attend(x,"
            " x, x if mask is None else x.hidden(mask))`)"
        ),
    ),
    "a constructor": (
        (
            "class A(Base):\n    def __init__(self, d_model, n_heads):\n       "
            " super().__init__(d_model, n_heads)\n        self.scale = d_modle\n"
        ),
        (
            "A(d_model=32, n_heads=2) raised NameError: name 'd_modle' is not defined "
            "(mine.py, line 29 in __init__: `self.scale = d_modle`)"
        ),
    ),
    "a constructor of other sizes": (
        (
            "class A(Base):\n    def __init__(self, d_model, n_heads):\n       "
            " super().__init__(d_model, n_heads)\n        assert d_model == 512\n"
        ),
        (
            "A(d_model=32, n_heads=2) raised AssertionError (mine.py, line 29 in __init__: `assert"
            " d_model == 512`); name a function that builds it: def attention(d_model, n_heads):"
            " return A(...)"
        ),
    ),
    "a function that makes a module": (
        "def A(d_model, n_heads):\n    return Bass(d_model, n_heads)\n",
        (
            "A(d_model=32, n_heads=2) raised NameError: name 'Bass' is not defined "
            "(mine.py, line 27 in A: `return Bass(d_model, n_heads)`)"
        ),
    ),
    "a kernel": (
        "def A(q, k, v):\n    return (q @ k.transposed(-1, -2)).softmax(-1) @ v\n",
        (
            "A cannot be judged: called with query, key and value, each call raises AttributeError:"
            " 'Tensor' object has no attribute 'transposed' (mine.py, line 27 in A: `return (q @"
            " k.transposed(-1, -2)).softmax(-1) @ v`)"
        ),
    ),
    "a kernel whose other dtypes share an error": (
        (
            "def A(q, k, v):\n    q = torch.baddbmm(torch.zeros(q.shape[1:]), q[0], k[0].mT @"
            " k[0])\n    return weights @ v\n"
        ),
        (
            "A cannot be judged: called with query, key and value, calls raise NameError: name"
            " 'weights' is not defined (mine.py, line 28 in A: `return weights @ v`)"
        ),
    ),
    "a kernel of a mask": (
        (
            "def A(q, k, v, mask=None):\n    m = None if mask is None else mask.to_bool()\n"
            "    return scaled_dot_product_attention(q, k, v, m)\n"
        ),
        (
            "A cannot be judged as it is: each call with a mask raises AttributeError: 'Tensor'"
            " object has no attribute 'to_bool' (mine.py, line 27 in A: `m = None if mask is None"
            " else mask.to_bool()`)"
        ),
    ),
    "a package": (
        of_core("import no_such_package.inner"),
        (
            "A needs no_such_package, which cannot be imported here; install it, or add the folder"
            " that has it to PYTHONPATH (each call raises ModuleNotFoundError: No module named"
            f" 'no_such_package' ({FRAMES}`import no_such_package.inner`))"
        ),
    ),
}


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("case", REFUSED)
def test_error_of_the_code_is_shown_where_it_arose(case: str, tmp_path: Path) -> None:
    code, message = REFUSED[case]
    assert refusal(tmp_path, code, "A") == message


@pytest.mark.parametrize(
    ("code", "shown", "advice"),
    [
        (
            "def A(q, k, v):\n    return (q @ k).softmax(-1) @ v\n",
            "(mine.py, line 27 in A: `return",
            "from_kernel(A, layout",
        ),
        (
            (
                "class A(Base):\n    def forward(self, x, places):\n        return self.attend(x +"
                " places.float(), x, x)\n"
            ),
            "'NoneType' object has no attribute 'float' (mine.py, line 28 in forward: `return",
            "forward also requires places, of no known meaning, and was given None; pass call=...",
        ),
    ],
    ids=["of axes", "of an unknown input"],
)
def test_declaration_is_suggested_where_the_call_may_not_fit(
    code: str, shown: str, advice: str, tmp_path: Path
) -> None:
    message = refusal(tmp_path, code, "A")
    assert message.startswith("A needs a declaration: ")
    assert shown in message
    assert advice in message


WITHOUT_A_GPU = {
    "a method": ("self.cuda()", ""),
    "a word": ('self.table = torch.zeros(3, device="cuda")', ""),
    "a parameter": (
        "self.table = torch.zeros(3, device=device)",
        ', or judge functools.partial(A, device="cpu")',
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("case", WITHOUT_A_GPU)
def test_constructor_that_needs_a_gpu_is_said_to(case: str, tmp_path: Path) -> None:
    line, on_cpu = WITHOUT_A_GPU[case]
    device = ', device="cuda"' if on_cpu else ""
    code = f"class A(Base):\n    def __init__(self, d_model, n_heads{device}):\n"
    message = refusal(
        tmp_path, f"{code}        super().__init__(d_model, n_heads)\n        {line}\n", "A"
    )
    needs = "A needs CUDA, and there is none here; run it with --device cuda where there is one"
    assert message.startswith(f"{needs}{on_cpu} (A(d_model=32, n_heads=2) raised ")
    assert message.endswith(f"(mine.py, line 29 in __init__: `{line}`))")


@pytest.mark.mostly_slow(2)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "line", ["q = q.cuda()", "assert q.is_cuda", 'raise ValueError("only on GPUs")']
)
@pytest.mark.parametrize("is_kernel", [False, True])
def test_call_that_needs_a_gpu_is_said_to(line: str, is_kernel: bool, tmp_path: Path) -> None:
    code = (
        f"def A(q, k, v):\n    {line}\n    return q\n"
        if is_kernel
        else of_core(f"{line}; return q")
    )
    message = refusal(tmp_path, code, "A")
    assert message.startswith(
        "A needs CUDA, and there is none here; run it with --device cuda where there is one (each"
        " call"
    )
    assert "mine.py, line " in message


def test_triton_is_an_extra_of_this_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    needs = 'needs triton, which is not installed: pip install "mha-conformance[triton]"'
    assert refusal(tmp_path, of_core("import triton.language as tl"), "A").startswith(
        f"A {needs} (each call raises Mod"
    )
    message = refusal(tmp_path, "import triton\n", "A")
    assert f"mine.py' cannot be run: it {needs} (ModuleNotFoundError: " in message
    assert message.endswith(" (mine.py, line 26: `import triton`))")


def test_file_that_raises_is_shown_with_its_lines(tmp_path: Path) -> None:
    message = refusal(
        tmp_path, "def table(size):\n    return 1 / size\n\nTABLE = table(0)\n", "TABLE"
    )
    assert message.endswith(
        "ZeroDivisionError: division by zero (mine.py, line 29, line 27 in table: `return 1 /"
        " size`)"
    )
    assert "cannot be run: Skipped: not here (mine.py, line 26: `" in refusal(
        tmp_path, 'import pytest; pytest.skip("not here", allow_module_level=True)', "A"
    )


def test_file_that_raises_takes_no_other_module_away(tmp_path: Path) -> None:
    import json

    (tmp_path / "json.py").write_text("1 / 0")
    with pytest.raises(ImplementationError, match="ZeroDivisionError"):
        resolve(f"{tmp_path / 'json.py'}:A")
    assert sys.modules["json"] is json


RECEIVERS = """
class A(Base):
    def __init__(this, config):
        super().__init__(config.hidden_size, config.num_attention_heads)

    def forward(this, x):
        return this.attend(x, x, x)


class OfTwo(Base):
    def forward(module, x, context):
        return module.attend(x, context, context)


class Heads(nn.Module):
    def forward(_, query, key, value):
        return scaled_dot_product_attention(query, key, value)


class Residual(Base):
    def forward(me, x):
        return x + me.attend(x, x, x)


class OfAConfig(A):
    def __init__(me, cfg):
        super().__init__(cfg)
        me.width = cfg.special_width
"""


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("A", "one, as self-attention"),
        ("OfTwo", "query, and context as key and value"),
        ("Heads", "quer"),
    ],
)
def test_receiver_may_have_any_name(name: str, inputs: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HEAD + RECEIVERS)
    (resolved,) = resolve(f"{tmp_path / 'mine.py'}:{name}")
    assert resolved.inference
    assert next(row.finding for row in resolved.inference.rows if row.topic == "inputs").startswith(
        inputs
    )
    assert check(resolved, "quick", clauses=["HED-1"], dtypes=["float32"]).conforms


def test_advice_names_no_receiver(tmp_path: Path) -> None:
    residual = refusal(tmp_path, RECEIVERS, "Residual")
    assert "residual=True" in residual
    assert "me=" not in residual
    config = "types.SimpleNamespace(hidden_size=..., num_attention_heads=..., special_width=...)"
    assert "its config has no special_width" in (
        message := refusal(tmp_path, RECEIVERS, "OfAConfig")
    )
    assert "me=" not in message
    assert "special_width=...)" in message, config


def test_judged_call_that_raises_says_where(tmp_path: Path) -> None:
    code = (
        "class A(Base):\n    def forward(self, x):\n        return self.one(x) if len(x) == 1 else"
        " self.attend(x, x, x)"
    )
    (tmp_path / "mine.py").write_text(
        f"{HEAD}{code}\n\n    def one(self, x):\n        return x + nothing\n"
    )
    (verdict,) = check(
        f"{tmp_path / 'mine.py'}:A", "quick", clauses=["SHP-1"], dtypes=["float32"]
    ).verdicts
    assert (
        verdict.message
        == "the call raised NameError: name 'nothing' is not defined (mine.py, line 28 in forward,"
        " line 31 in one)"
    )


def test_command_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{HEAD}import no_such_package\n")
    status, output = run(f"{tmp_path / 'mine.py'}:A")
    assert status == 2
    assert "Traceback" not in output
    assert output.count("mha: ") == 1


def raised_by(code: str) -> BaseException:
    try:
        exec(compile(code, "/an/authors/file.py", "exec"), {"__name__": "file"})
    except BaseException as error:
        return error
    raise AssertionError


def test_what_torch_and_python_pass_is_not_shown() -> None:
    error = raised_by("import json\n\ndef read(text):\n    return json.loads(text)\n\nread('{')")
    assert place_of(error) == "file.py, line 6, line 4 in read"
    assert place_of(error, most=1) == "file.py, line 4 in read"
    assert place_of(ValueError()) == ""
    assert place_of(raised_by("x = [")) == ""


def test_package_is_found_behind_other_exceptions() -> None:
    missing = (
        "try:\n    import no_such_package\nexcept ImportError as error:\n    raise"
        " RuntimeError('none') from "
    )
    assert needs_of(raised_by(f"{missing}error")).startswith(
        "needs no_such_package, which cannot be imported here; "
    )
    assert needs_of(raised_by(f"{missing}None")) == ""
    assert needs_of(raised_by("error = ValueError()\nraise error from error")) == ""


def test_error_of_the_code_comes_before_errors_of_shapes() -> None:
    def made(kind: str, place: str = "a.py", needs: str = "") -> Raised:
        return Raised(kind, f"{kind}: text", place, needs)

    shapes, shapes_elsewhere, name = (
        made("RuntimeError"),
        made("RuntimeError", "b.py"),
        made("NameError"),
    )
    assert main_one([[shapes], [name]]) is name
    assert main_one([[shapes], [shapes_elsewhere], [shapes_elsewhere]]) is shapes_elsewhere
    assert main_one([[shapes], [shapes_elsewhere]]) is shapes
    assert main_one([[name], [gpu := made("RuntimeError", needs="needs CUDA")]]) is gpu
    assert not made("NameError", place="").is_of_code
    assert not made(
        "TypeError", place="a.py, line 3 in check: `raise TypeError('float32 alone')`"
    ).is_of_code
    assert not Raised("TypeError", "TypeError: 'NoneType' is not iterable", "a.py", "").is_of_code


@pytest.mark.parametrize(
    ("error", "is_needed"),
    [
        (RuntimeError("Found no NVIDIA driver on your system"), True),
        (RuntimeError("0 active drivers ([]). There should only be one."), True),
        (ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"), True),
        (AssertionError("Torch not compiled with CUDA enabled"), True),
        (NameError("name 'cuda' is not defined"), False),
        (RuntimeError("shapes do not fit"), False),
    ],
    ids=lambda each: str(each)[:20],
)
def test_messages_of_code_for_gpus_are_known(
    error: BaseException, is_needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bool(needs_of(error)) == is_needed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert needs_of(error) == ""
