"""Input that `mha` cannot use: `python -m support.bad_inputs > docs/bad-inputs.md`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from support.reports_made import two_implementations

MINE = """
from torch import nn

class Right(nn.MultiheadAttention):
    pass

class Nothing(nn.Module):
    pass

class Raises(nn.Module):
    def __init__(self, d_model, n_heads):
        raise RuntimeError("no luck")

    def forward(self, query, key, value):
        return query

class NoSizes(nn.Module):
    def __init__(self, frobnication, widgets):
        super().__init__()

    def forward(self, x):
        return x

class OneLayer(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.q = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.q(x)

class Other:
    pass

def packed(qkv, dropout_p=0.0, softmax_scale=None, causal=False):
    return qkv


def varlen(qkv, cu_seqlens, max_seqlen):
    return qkv


def of_weights(x, w_q, w_k, w_v, w_o):
    return x


def of_one(text):
    return text

built, number = nn.Linear(2, 2), 3
"""
WAIVER = '[[waiver]]\nimplementation = "sdpa"\nclause = "MSK-8"\n'
FILES = {
    "mine.py": MINE,
    "empty.py": "",
    "syntax.py": "def f(:\n",
    "raises.py": "1 / 0\n",
    "exits.py": "import sys\n\nsys.exit('bye')\n",
    "imports.py": "import no_such_package\n",
    "sharded.py": (
        """from torch.distributed.tensor.placement_types import Shard
from mha.implementations import from_sharded
from mha.spec import Claims

implementation = from_sharded(print, placements=Shard(1), claims=Claims(world_sizes={2}))
"""
    ),
    "local.py": (
        """from torch.distributed.tensor.placement_types import Shard
from mha.implementations import from_sharded
from mha.spec import Claims


def attend(query, key, value, *, mask, is_causal, mesh):
    return value


attend = from_sharded(attend, placements=Shard(2), claims=Claims(world_sizes={2}))
"""
    ),
    "ranks.py": (
        """from mha.implementations import from_kernel
from mha.spec import Claims


def attend(q, k, v):
    return v


claims = Claims(world_sizes={2}, masks=(), causal=None)
implementation = from_kernel(attend, mask=None, claims=claims)
"""
    ),
    "text.json": "text",
    "list.json": "[]",
    "broken.toml": "[[waiver]\n",
    "reasons.toml": f'{WAIVER}reasons = "x"\n',
    "unknown.toml": f'{WAIVER}reason = "x"\n'.replace("MSK-8", "MSK-88"),
    "where.toml": f'{WAIVER}reason = "x"\nwhere = "L >"\n',
    "expires.toml": f'{WAIVER}reason = "x"\nexpires = "soon"\n',
    "number.toml": "waiver = 1\n",
    "plan.toml": 'implementations = ["loop"]\ndtypes = ["float32"]\n',
    "seed.toml": 'implementations = ["loop"]\nseed = 3\n',
    "nobody.toml": 'implementations = ["sdpaa"]\n',
    "package.toml": 'implementations = ["loop"]\npackages = ["no-such-package"]\n',
    "other.toml": f'{WAIVER}reason = "x"\n'.replace("sdpa", "nobody"),
}


def stage(folder: Path) -> None:
    """Write the files that the commands name."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    report = two_implementations().to_json()
    (folder / "run.json").write_text(report)
    (folder / "cut.json").write_text(report[:500])
    (folder / "later.json").write_text(json.dumps(json.loads(report) | {"format": 99}))
    (folder / "seed7.json").write_text(json.dumps(json.loads(report) | {"seed": 7}))
    (folder / "campaign").mkdir()
    (folder / "campaign" / "plan.json").write_text(
        '{"plan": {"clauses": ["MSK"]}, "versions": {}, "keys": []}'
    )
    (folder / "full.md").symlink_to("/dev/full")


IN_RUN = ("--run", "run.json")
WAIVE = ("waive", "MSK-8", "--reason", "x", *IN_RUN)
CAMPAIGN = ("campaign", "run", "plan.toml", "--out", "new")
ON_SDPA = ("--impl", "sdpa")
# What is given, and part of the line that answers.
BAD_INPUTS: dict[str, tuple[tuple[str, ...], str]] = {
    "a near name": (
        ("check", "sdpaa"),
        "no implementation is registered as 'sdpaa'; did you mean sdpa?",
    ),
    "an empty name": (("check", ""), "no implementation is registered as '' (registered: "),
    "a folder": (("check", "."), "no implementation is registered as '.' (registered: "),
    "no such file": (("check", "nowhere.py:Right"), "there is no file 'nowhere.py'"),
    "a file without a name": (
        ("check", "mine.py"),
        "name a class in it, as mine.py:NAME (its classes: Right, Nothing",
    ),
    "a file without classes": (
        ("check", "empty.py"),
        "name a class in it, as empty.py:NAME (its classes: none)",
    ),
    "a near class": (
        ("check", "mine.py:Rigth"),
        "'mine.py:Rigth' does not exist; did you mean Right? (the module ",
    ),
    "no class": (
        ("check", "mine.py:"),
        "'mine.py:' does not exist (the module defines nn, Right, ",
    ),
    "no such module": (
        ("check", "no_such_module:Right"),
        "the module 'no_such_module' cannot be imported: ModuleNotF",
    ),
    "a syntax error": (
        ("check", "syntax.py:A"),
        "'syntax.py' cannot be run: SyntaxError: invalid syntax",
    ),
    "a file that raises": (
        ("check", "raises.py:A"),
        "'raises.py' cannot be run: ZeroDivisionError: division by zero",
    ),
    "a file that exits": (("check", "exits.py:A"), "'exits.py' cannot be run: SystemExit: bye"),
    "a missing package": (
        ("check", "imports.py:A"),
        "'imports.py' cannot be run: it needs no_such_package, which",
    ),
    "placements that do not fit": (
        ("check", "sharded.py:implementation"),
        (
            "'sharded.py' cannot be run: ImplementationError: print: placements must give Shard(2),"
            " the sequence, or "
        ),
    ),
    "a function under the name of what wraps it": (
        ("check", "local.py:attend"),
        (
            "attend cannot be sent to the ranks (Can't pickle <function attend>: it's not the same"
            " object as local.attend)"
        ),
    ),
    "ranks without a form for them": (
        ("check", "ranks.py:implementation"),
        (
            "attend claims ranks (Claims.world_sizes), but has no build_rank, placements, order and"
            " unsharded"
        ),
    ),
    "a class without forward": (("check", "mine.py:Nothing"), "Nothing does not define forward"),
    "a constructor that raises": (
        ("check", "mine.py:Raises"),
        "raised RuntimeError: no luck (mine.py, line 12 in __init__: `raise RuntimeError(",
    ),
    "unknown sizes": (
        ("check", "mine.py:NoSizes"),
        (
            "none of the parameters of its constructor (frobnication, widgets) has a known name of"
            " d_model"
        ),
    ),
    "a layer that is no attention": (
        ("check", "mine.py:OneLayer"),
        (
            "OneLayer needs a declaration: no parameter looks like the projection of k, v (its"
            " parameters: q.weight"
        ),
    ),
    "a class that is no module": (
        ("check", "mine.py:Other"),
        "is a class, neither a torch.nn.Module class nor",
    ),
    "a function of one argument": (
        ("check", "mine.py:of_one"),
        "of_one takes (text); a kernel takes query, key and",
    ),
    "a kernel of packed inputs": (
        ("check", "mine.py:packed"),
        (
            "packed needs a declaration: called with qkv of shape (b, l, 3, h, d), ValueError: its"
            " context has the shape"
        ),
    ),
    "a kernel of packed sequences": (
        ("check", "mine.py:varlen"),
        "varlen takes sequences packed one after another (",
    ),
    "a function of weights": (
        ("check", "mine.py:of_weights"),
        "of_weights takes its weights as arguments (w_q, w_k, ",
    ),
    "a module that is built": (
        ("check", "mine.py:built"),
        "name the class Linear instead, because it is built in man",
    ),
    "a number": (
        ("check", "mine.py:number"),
        "'mine.py:number' is of type int, neither a torch.nn.Module class nor",
    ),
    "two of one name": (
        ("check", "loop=sdpa", "loop"),
        "two implementations are named 'loop'; name one differently",
    ),
    "one name for all": (("check", "mine=all"), "'mine=all' gives one name to all implementations"),
    "two dtypes as words": (
        ("check", "sdpa", "--dtype", "float32", "float64"),
        "'float64' is a dtype, not an implementation; several go together: --dtype float32,float64",
    ),
    "a near dtype": (
        ("check", "sdpa", "--dtype", "float3"),
        "unknown dtype 'float3'; did you mean float32 or float64",
    ),
    "no dtype": (("check", "sdpa", "--dtype", ""), "no dtype is named"),
    "an unknown device": (
        ("check", "sdpa", "--device", "gpu"),
        "unknown device 'gpu'; did you mean cpu? Known: cpu,",
    ),
    "an unknown profile": (
        ("check", "sdpa", "--profile", "fast"),
        "unknown profile 'fast'; known: quick, default, th",
    ),
    "an unknown clause": (
        ("check", "sdpa", "--clause", "MSK-99"),
        "unknown clause 'MSK-99'; did you mean MSK-9 or ",
    ),
    "an unknown clause to require": (
        ("check", "sdpa", "--require", "MSK-99"),
        "unknown clause 'MSK-99'; did you mean MSK",
    ),
    "a near family": (
        ("check", "sdpa", "--clause", "MKS"),
        "unknown clause 'MKS'; did you mean MSK? (`mha spec` list",
    ),
    "no clause to check": (
        ("check", "sdpa", "--clause", ""),
        "no clause is named; leave it out to judge all of them",
    ),
    "JSON in a text file": (
        ("check", "sdpa", "--json", "x.txt"),
        "--json takes - or a file name that ends in .json",
    ),
    "JSON in no folder": (
        ("check", "sdpa", "--json", "no/x.json"),
        "'no/x.json' cannot be written, since there is no",
    ),
    "a report in an unknown format": (
        ("check", "sdpa", "--report", "x.pdf"),
        "--report takes a file name that ends in .html, .json or .md",
    ),
    "a report in no folder": (
        ("check", "sdpa", "--report", "no/x.md"),
        "'no/x.md' cannot be written, since there is",
    ),
    "no waiver file": (
        ("check", "sdpa", "--waivers", "no.toml"),
        "the waiver file 'no.toml' cannot be read: ",
    ),
    "a waiver file that is not TOML": (
        ("check", "sdpa", "--waivers", "broken.toml"),
        "broken.toml is not valid TOML:",
    ),
    "waivers that are no tables": (
        ("check", "sdpa", "--waivers", "number.toml"),
        "must hold only tables [[waiver]],",
    ),
    "a waiver with an unknown key": (
        ("check", "sdpa", "--waivers", "reasons.toml"),
        (
            "reasons.toml, waiver 1: unknown reasons; missing reason (required: implementation,"
            " clause, reason; "
        ),
    ),
    "a waiver of an unknown clause": (
        ("check", "sdpa", "--waivers", "unknown.toml"),
        "unknown.toml, waiver 1: unknown clause 'MSK-88'; `mha spec` lists them",
    ),
    "a waiver with half a predicate": (
        ("check", "sdpa", "--waivers", "where.toml"),
        "where.toml, waiver 1: where: 'L >' is not an expression",
    ),
    "a waiver with half a date": (
        ("check", "sdpa", "--waivers", "expires.toml"),
        (
            "expires.toml, waiver 1: expires must be a date such as 2030-12-31, without quotes, but"
            " is 'soon'"
        ),
    ),
    "a waiver of another implementation": (
        ("check", "sdpa", "--waivers", "other.toml"),
        "waives clauses of nobody",
    ),
    "a page that is none": (
        ("spec", "MSK-99"),
        "'MSK-99' is neither a clause, such as MSK-1, nor a family, such as",
    ),
    "no run": (("replay",), "no run is saved in this folder"),
    "no run to waive": (("waive", "MSK-8", "--reason", "x"), "no run is saved in this folder"),
    "no report": (
        ("report", "nowhere.json"),
        "the report 'nowhere.json' cannot be read: No such file",
    ),
    "a folder for a report": (("report", "."), "the report '.' cannot be read: Is a directory"),
    "a text for a report": (
        ("report", "text.json"),
        "'text.json': not a report of mha-conformance: not JSON: ",
    ),
    "half a report": (
        ("report", "cut.json"),
        "'cut.json': not a report of mha-conformance: not JSON: Unterminated",
    ),
    "another JSON": (
        ("report", "list.json"),
        "'list.json': not a report of mha-conformance: it has no format",
    ),
    "a report of a later version": (
        ("report", "later.json"),
        "has format 99, but this version reads formats 1 and 2",
    ),
    "three reports": (
        ("report", "a", "b", "c"),
        "only two reports can be compared, but 3 are given; add --merge",
    ),
    "two runs to merge": (
        ("report", "run.json", "seed7.json", "--merge"),
        "not shards of one run: seed is 0 in one and 7 in another",
    ),
    "another format": (
        ("report", "run.json", "--to", "c.pdf"),
        "--to takes a file name that ends in .html, .json or .md",
    ),
    "a full disk": (("report", "run.json", "--to", "full.md"), "No space left on device"),
    "nothing to replay": (
        ("replay", "run.json", "--clause", "CAU-1"),
        "nothing to replay: 'run.json' has no failure of CAU-1",
    ),
    "an implementation of unknown origin": (
        ("replay", "run.json"),
        "does not say where 'faulty' is; name it with --impl",
    ),
    "a case without its clause": (("replay", "Case(L=2)"), "add --clause and --impl"),
    "half a case": (("replay", "Case(L=)", "--clause", "MSK-1", *ON_SDPA), "is not a case"),
    "an unknown field": (
        ("replay", "Case(T=1)", "--clause", "MSK-1", *ON_SDPA),
        "a case takes only B, L, S",
    ),
    "a length of letters": (
        ("replay", "Case(L='x')", "--clause", "MSK-1", *ON_SDPA),
        "the L of a case must be",
    ),
    "a negative length": (
        ("replay", "Case(L=-1)", "--clause", "MSK-1", *ON_SDPA),
        "must be a value such as 1, but is",
    ),
    "an unknown mask": (
        ("replay", "Case(mask='x')", "--clause", "MSK-1", *ON_SDPA),
        "unknown mask of a case",
    ),
    "a case that its clause is not about": (
        ("replay", "Case(L=2)", "--clause", "CAU-1", *ON_SDPA),
        "INAPPLICABLE CAU-1   sdpa: the clause cannot be judged on this case",
    ),
    "more ranks than the claim": (
        ("replay", "Case(ranks=9)", "--clause", "DST-1", "--impl", "ring"),
        "ring claims [1, 2, 3, 4] ranks (Claims.world_sizes), not 9; give the case another `ranks`",
    ),
    "several implementations": (("replay", "run.json", "--impl", "all"), "'all' names "),
    "nothing to show": (("show", ""), "no run is saved in this folder"),
    "no such clause to waive": (
        ("waive", "MSK-99", "--reason", "x", *IN_RUN),
        "unknown clause 'MSK-99'",
    ),
    "a clause that passes": (
        ("waive", "CAU-1", "--reason", "x", *IN_RUN),
        "nothing to waive: CAU-1 does not fail in",
    ),
    "another implementation": (
        (*WAIVE, "--impl", "nobody"),
        "nothing to waive: MSK-8 does not fail for nobody in",
    ),
    "no reason": (("waive", "MSK-8", "--reason", " ", *IN_RUN), "a waiver needs a reason"),
    "a predicate that is too long": (
        (*WAIVE, "--where", "not " * 20000 + "L"),
        "is not an expression",
    ),
    "a call in a predicate": ((*WAIVE, "--where", "len(x)"), "may only compare"),
    "an unknown field in a predicate": (
        (*WAIVE, "--where", "regimes == 'large'"),
        "a case has no regimes; it has B, ",
    ),
    "another case": (
        (*WAIVE, "--where", "L > 5"),
        "--where 'L > 5' excludes the case that fails: Case(mask='empty_",
    ),
    "a day in the past": ((*WAIVE, "--expires", "2001-01-01"), "--expires must not be in the past"),
    "a broken file for a waiver": (
        (*WAIVE, "--file", "broken.toml"),
        "broken.toml is not valid TOML: ",
    ),
    "no folder for a waiver": (
        (*WAIVE, "--file", "no/w.toml"),
        "'no/w.toml' cannot be written: No such file",
    ),
    "an unknown shape": (
        ("bench", "sdpa", "--shape", "big"),
        "unknown shape 'big'; known: encoder, long, huge, token",
    ),
    "times in a text file": (
        ("bench", "sdpa", "--to", "x.txt"),
        "--to takes a file name that ends in .html, .json or",
    ),
    "a class that is declared": (
        ("init", "sdpa"),
        "'sdpa' is already declared; init takes a plain class, such as",
    ),
    "no folder for a declaration": (
        ("init", "sdpa", "--folder", "nowhere"),
        "--folder: there is no folder 'nowhere'",
    ),
    "a near fault": (("faults", "Sinks"), "there is no fault 'Sinks'; did you mean Sink"),
    "no plan": (
        ("campaign", "run", "no.toml", "--out", "new"),
        "the plan 'no.toml' cannot be read: No such file",
    ),
    "a plan with an unknown key": (
        ("campaign", "run", "seed.toml", "--out", "new"),
        "seed.toml: unknown key 'seed'; did you mean seeds? (known: implementations, ",
    ),
    "a plan of a near name": (
        ("campaign", "run", "nobody.toml", "--out", "new"),
        "no implementation is registered as 'sdpaa'; did you mean sdpa?",
    ),
    "a plan of a package that is not installed": (
        ("campaign", "run", "package.toml", "--out", "new"),
        "packages: 'no-such-package' is not installed here",
    ),
    "a shard that does not exist": (
        (*CAMPAIGN, "--shard", "4/3"),
        "--shard takes I/N with I from 1 to N, such as",
    ),
    "an unknown engine": (
        (*CAMPAIGN, "--engine", "dask"),
        "unknown engine 'dask'; known: local, ray",
    ),
    "an address without a cluster": (
        (*CAMPAIGN, "--address", "auto"),
        "--address is of a Ray cluster: add --engine ray",
    ),
    "something else to retry": (
        (*CAMPAIGN, "--retry", "all"),
        "--retry takes crashed, but was given 'all'",
    ),
    "the folder of another campaign": (
        ("campaign", "run", "plan.toml", "--out", "campaign"),
        (
            "'campaign' is the folder of another campaign: clauses is ['MSK'] there, but [] now;"
            " name another folder"
        ),
    ),
    "a folder with other things": (
        ("campaign", "run", "plan.toml", "--out", "."),
        "'.' is neither empty nor the folder of a campaign; name another folder",
    ),
    "no campaign": (
        ("campaign", "report", "nowhere"),
        "'nowhere' is not the folder of a campaign: it has no ",
    ),
    "a campaign without results": (
        ("campaign", "report", "campaign"),
        "'campaign' has no results yet",
    ),
    "no folder for a matrix": (
        ("faults", "Sink", "--json", "no/x.json"),
        "there is no folder 'no' to write 'x.json'",
    ),
}


def main() -> None:
    """Print a table of what is given and what is answered, each in a process of its own."""
    print("# Bad input\n\nEach ends with exit status 2, one line, and no traceback.")
    print("\n| given | `mha ...` | answer |\n|---|---|---|")
    with TemporaryDirectory() as folder:
        stage(Path(folder))
        for what, (arguments, _) in BAD_INPUTS.items():
            command = [sys.executable, "-m", "mha.conformance", *arguments]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            (answer,) = (done.stdout + done.stderr).splitlines()
            if done.returncode != 2:
                raise SystemExit(f"{what}: exit status {done.returncode}, {answer}")
            given = " ".join(repr(each) if not each or " " in each else each for each in arguments)
            print(f"| {what} | `{_cut(given, 60)}` | {_cut(answer.removeprefix('mha: '), 300)} |")


def _cut(text: str, longest: int) -> str:
    text = re.sub(r"([|<])", r"\\\1", text)
    return text if len(text) <= longest else f"{text[:longest]} ..."


if __name__ == "__main__":
    main()
