"""Judge a few implementations with other versions of Python, torch and the dependencies.

`make versions` tries each environment in build/versions, and removes it when it has passed. One
whose Python is not on the PATH is left out, unless it is named:

    python -m support.versions lowest torch-2.9

On Linux, pip takes builds of torch for CUDA, of several GB, unless `--torch-index` has the address
of an index of builds for the CPU.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support.documents import blocks
from support.folders import ROOT

FOLDER = ROOT / "build" / "versions"
LOWEST = ROOT / "tests" / "support" / "lowest.txt"


@dataclass(frozen=True)
class Environment:
    """What is installed: torch as pip takes it; the lowest of each dependency, or the newest."""

    name: str
    python: str
    torch: str = "torch"
    lowest: bool = False


ENVIRONMENTS = (
    Environment("lowest", "3.11", lowest=True),
    Environment("torch-2.6", "3.11", "torch==2.6.*"),
    Environment("torch-2.9", "3.11", "torch==2.9.*"),
    Environment("torch-2.13", "3.11", "torch==2.13.*"),
    Environment("python-3.11", "3.11"),
    Environment("python-3.12", "3.12"),
    Environment("python-3.13", "3.13"),
    Environment("python-3.14", "3.14"),
)


@dataclass(frozen=True)
class Step:
    """A command, its exit status, and what its output has: a status alone may be an accident."""

    command: str
    texts: tuple[str, ...]
    status: int = 0


README = dict(blocks("README.md"))
WRONG = ("MyAttention: DOES NOT CONFORM", "(MSK-1, SMX-4)")
OF_README = Step(README["command"].strip(), WRONG, status=1)
PLAN = 'implementations = ["sdpa"]\ndtypes = ["float32"]\nclauses = ["SHP-1"]\n'
THREE = ("minimal", "sdpa", "torch_mha")
CONFORM = tuple(f"{name}: CONFORMS" for name in THREE)
PYTEST = f"pytest {ROOT / 'conformance'} --mha-impl minimal --mha-profile quick -q"
STEPS = (
    Step("mha --help", ("Usage: mha [OPTIONS]",)),
    Step("mha check --help", ("Usage: mha check [OPTIONS]", "--profile")),
    Step("mha spec MSK-1", ("MSK-1 (MUST): Masked keys have no influence",)),
    OF_README,
    Step("mha show MSK-1", ("MSK-1 (MUST)", "usual fix")),
    Step(f"mha check {' '.join(THREE)} --profile quick --dtype float32", CONFORM),
    Step("mha campaign run plan.toml --out results", ("1 of 1 jobs are done",)),
    Step(f"{PYTEST} -k SHP", CONFORM[:1]),
    Step(f"{PYTEST} -k MSK-1 -n 2", CONFORM[:1]),
)


NOT_TRIED = "not tried"


class StepError(Exception):
    """A step, or the installation, does not do what it should."""


def run(command: list[str], folder: Path, step: Step) -> str:
    """Run a command in a folder, and return its output.

    Raises StepError if the exit status or the output is not that of the step.
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    output = done.stdout + done.stderr
    missing = [text for text in step.texts if text not in " ".join(output.split())]
    if done.returncode != step.status or missing:
        said = f"exit status {done.returncode}, without {missing}\n{output[-4000:]}"
        raise StepError(f"{step.command}: {said}")
    return output


def install(environment: Environment, python: str, torch_index: str) -> Path:
    """Make the virtual environment, and return its folder of programs."""
    folder = FOLDER / environment.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run([python, "-m", "venv", "venv"], folder, Step("venv", ()))
    programs = folder / "venv" / "bin"
    constraints = ["-c", str(LOWEST)] if environment.lowest else []
    pip = [str(programs / "pip"), "install", "-q", *constraints]
    index = ["--index-url", torch_index] if torch_index else []
    run([*pip, environment.torch, *index], folder, Step(f"pip install {environment.torch}", ()))
    ours = [environment.torch, "-e", f"{ROOT}[parallel]"]
    run([*pip, *ours], folder, Step("pip install -e .[parallel]", ()))
    return programs


def judge(environment: Environment, programs: Path) -> str:
    """Take all steps, and return the version of torch."""
    folder = programs.parent.parent
    (folder / "my_attention.py").write_text(README["my_attention.py"], encoding="utf-8")
    (folder / "plan.toml").write_text(PLAN, encoding="utf-8")
    for step in STEPS:
        print(f"{environment.name}: {step.command}", flush=True)
        program, *arguments = step.command.split()
        run([str(programs / program), *arguments], folder, step)
    python = str(programs / "python")
    code = "import sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__)"
    return run([python, "-c", code], folder, Step("versions", ("torch",))).strip()


def outcome(environment: Environment, torch_index: str) -> tuple[bool, str]:
    """Return whether an environment passed, and what to say of it."""
    python = shutil.which(f"python{environment.python}")
    if python is None:
        return False, f"{NOT_TRIED}: no python{environment.python}"
    started = time.monotonic()
    try:
        versions = judge(environment, install(environment, python, torch_index))
    except StepError as error:
        return False, f"FAILS: {error}"
    shutil.rmtree(FOLDER / environment.name)
    return True, f"passes: {versions}, in {time.monotonic() - started:.0f} s"


def chosen() -> tuple[list[Environment], argparse.Namespace]:
    """Return the environments that the command line names, or all, and its options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    by_name = {environment.name: environment for environment in ENVIRONMENTS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(by_name))
    parser.add_argument("--torch-index", default="", metavar="URL", help="where pip gets torch")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - by_name.keys()):
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in options.names or by_name], options


def main() -> int:
    """Try the environments, and return 1 if one fails, or is named and has no Python."""
    environments, options = chosen()
    status, lines = 0, []
    for environment in environments:
        passed, text = outcome(environment, options.torch_index)
        left_out = text.startswith(NOT_TRIED) and not options.names
        status |= int(not passed and not left_out)
        print(f"{environment.name}: {text}", flush=True)
        lines.append(f"{environment.name:12} {text.splitlines()[0]}")
    print("", *lines, sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
