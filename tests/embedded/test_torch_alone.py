"""What is for other programs imports torch alone, and needs little memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap

BLOCKED = "hypothesis pytest _pytest rich typer click pydantic einops jinja2 numpy.testing"


def run(program: str) -> str:
    """The output of a Python program in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_but_torch_is_imported() -> None:
    program = f"""
        import sys

        for name in "{BLOCKED}".split():
            sys.modules[name] = None  # its import raises ImportError
        import torch
        from mha.conformance import judge_kernel, judge_output, kernel_cases
        from mha.spec import Claims

        q = torch.ones(1, 2, 3, 8).bfloat16()
        print(judge_output((q, q, q), q).ok, judge_output((q, q, q), 0 * q).ok)
        claims = Claims(projections=False, masks=(), causal=None, dtypes={{"bfloat16"}})
        cases = kernel_cases(claims, budget=3)
        report = judge_kernel(lambda q, k, v: 0 * q, claims, cases=cases, seconds=60)
        print(report.conforms, report.to_json()[:20].split())
        ours = [name for name in sys.modules if name.startswith("mha.")]
        print(sorted({{".".join(name.split(".")[:3]) for name in ours}}))
        """
    verdicts, report, ours = run(program).splitlines()
    assert verdicts == "True False"
    assert report == "False ['{', '\"conforms\":', 'fals']"
    assert "mha.implementations" not in ours
    assert "mha.conformance.harness" not in ours


def test_peak_of_memory() -> None:
    """One head of 8192 keys is judged at a time, beside tensors of any size."""
    program = """
        import torch
        from mha.conformance import judge_output

        def now(field):
            lines = open("/proc/self/status").read().splitlines()
            return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024

        q = torch.randn(1, 4, 1, 128).bfloat16()
        k, v = torch.randn(2, 1, 4, 8192, 128).bfloat16()
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        judge_output((q[:, :1], k[:, :1, :64], v[:, :1, :64]), output[:, :1])
        open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
        before = now("VmRSS")
        assert judge_output((q, k, v), output).ok
        print(now("VmHWM") - before)
        """
    assert float(run(program)) < 400
