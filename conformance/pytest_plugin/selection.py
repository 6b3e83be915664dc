"""What the options of a run select: the settings, and the implementations to judge."""

from __future__ import annotations

import atexit
import gc
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mha.conformance.engine.estimate import estimate
from mha.conformance.project import pinned_contract
from mha.conformance.pytest_plugin.stash import SELECTION, is_benchmark_run
from mha.conformance.reports.files import validate_file
from mha.conformance.reports.text import describe_changes
from mha.conformance.results import now, versions
from mha.conformance.settings import DEFAULT_DTYPES, Settings, by_name, names_of
from mha.conformance.waivers import read_waivers
from mha.implementations import Registered, Resolved, discover, resolve
from mha.implementations.discovery import available
from mha.implementations.pristine import torch_changes


@dataclass(frozen=True)
class Selection:
    """What the options select.

    implementations: by name, in order. unavailable: the registered ones that could not be loaded.
    torch_changes: as in `Report`. started: when, in UTC.
    """

    settings: Settings
    implementations: dict[str, Resolved]
    unavailable: tuple[Registered, ...]
    torch_changes: tuple[str, ...]
    started: str

    def header(self) -> list[str]:
        """Return the lines that name what is judged, and how."""
        settings = self.settings
        packages = ", ".join(f"{name} {number}" for name, number in versions().items())
        strict = ", strict: a SHOULD counts as a MUST" if settings.strict else ""
        return [
            f"judging: {', '.join(self.implementations) or 'nothing'}",
            f"on: {', '.join(settings.devices)} in {', '.join(settings.dtypes)}; {settings}{strict}",
            f"with: {packages}",
            *([f"note: {describe_changes(self.torch_changes)}"] if self.torch_changes else []),
            *(f"inferred: {name}; see `mha check`" for name, each in self.implementations.items() if each.inference),
            *(f"unavailable: {entry.name} ({entry.target}): {entry.error}" for entry in self.unavailable),
        ]

    def takes(self, items: int) -> str:
        """Return the line that says about how long it takes to judge so many of the items."""
        settings, claims = self.settings, [each.implementation.claims for each in self.implementations.values()]
        share = items / max(1, len(claims) * len(settings.tasks))
        return f"estimate: {estimate(claims, settings, share)} on one core, if calls are as fast as the oracle's"


def selection(config: pytest.Config) -> Selection:
    """Return what the options select; an invalid option ends the run with status 2."""
    if SELECTION not in config.stash:
        atexit.register(gc.freeze)  # spares the interpreter a last garbage collection through all of torch
        try:
            config.stash[SELECTION] = _select(config)
        except ValueError as error:
            raise pytest.exit.Exception(f"mha: {error}", returncode=2) from None
    return config.stash[SELECTION]


def _select(config: pytest.Config) -> Selection:
    """Return what the options select; raise ValueError, in one line, for an invalid option."""
    settings = _settings(config)
    registered, resolved = _resolve(config)
    implementations = by_name(resolved)
    _validate_reports(config)
    if file := config.option.mha_waivers:
        settings = replace(settings, waivers=tuple(read_waivers(Path(file), implementations)))
    unavailable = tuple(entry for entry in registered if entry.implementation is None)
    return Selection(settings, implementations, unavailable, torch_changes(), now())


def _settings(config: pytest.Config) -> Settings:
    """Return the settings without waivers; before benchmarks, the default is a quick profile in float32."""
    option, quick = config.option, is_benchmark_run(config)
    if not str(option.mha_seed).isdecimal():
        raise ValueError(f"--mha-seed must be a whole number, 0 or more, but is {option.mha_seed!r}")
    return Settings(
        profile=option.mha_profile or ("quick" if quick else "default"),
        seed=int(option.mha_seed),
        dtypes=names_of(option.mha_dtype) or DEFAULT_DTYPES[: 1 if quick else 2],
        devices=names_of(option.mha_device) or ("cpu",),
        strict=option.mha_strict,
        contract=pinned_contract(config.invocation_params.dir),
    )


def _resolve(config: pytest.Config) -> tuple[list[Registered], list[Resolved]]:
    """Return the registered implementations if they were asked for, and those to be judged."""
    targets = names_of(config.option.mha_impl)
    if config.option.mha_impl and not targets:
        raise ValueError("--mha-impl is empty; name an implementation, or leave it out to check what is registered")
    registered = discover() if "all" in targets else [] if targets else _registered()
    named = [each for target in targets if target != "all" for each in resolve(target)]
    return registered, [*available(registered), *named]


def _registered() -> list[Registered]:
    """Return what other packages have registered, or the built-in implementations where there is nothing else."""
    registered = discover()
    return [entry for entry in registered if not entry.is_built_in] or registered


def _validate_reports(config: pytest.Config) -> None:
    for file in config.option.mha_report:
        if is_benchmark_run(config):
            raise ValueError("--mha-report does not apply to benchmarks; use --benchmark-json FILE")
        validate_file(Path(file), "--mha-report")
