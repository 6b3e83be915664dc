"""The files of SGLang's Triton kernels, without the rest of it, whose import needs a GPU."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

from mha.implementations.discovery.errors import UnavailableError

KERNELS = "sglang.kernels.ops.attention"
ASKED = ("is_cuda", "is_hip", "is_gfx95_supported", "is_gfx1250_supported")


def load(name: str) -> ModuleType:
    """Return a module of kernels, such as "merge_state".

    What it asks of the device and of environment variables is answered as where there is no GPU,
    and no variable is set.

    Raises UnavailableError without Triton's interpreter, or without sglang.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise UnavailableError("Triton's interpreter runs it, with TRITON_INTERPRET=1")
    if KERNELS not in sys.modules:
        found = find_spec("sglang")
        if found is None or found.origin is None:
            raise UnavailableError(
                "it needs an optional package: pip install --no-deps sglang==0.5.23"
            )
        _stand_in(Path(found.origin).parent)
    return import_module(f"{KERNELS}.{name}")


def _stand_in(folder: Path) -> None:
    """Put empty packages in the place of sglang's, and answers in that of what they ask."""
    package = ""
    for part in KERNELS.split("."):
        package = f"{package}.{part}" if package else part
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(folder.parent.joinpath(*package.split(".")))]
    unset = SimpleNamespace(get=lambda: False)
    answers = {name: lambda: False for name in ASKED}
    modules = {
        "sglang.srt": {},
        "sglang.srt.environ": {"envs": SimpleNamespace(SGLANG_TRITON_FP8_PREFILL_ATTN=unset)},
        "sglang.srt.utils": answers | {"get_device_core_count": lambda: 1},
    }
    for name, attributes in modules.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(attributes)
