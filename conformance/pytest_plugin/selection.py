"""What the options of a run select: the settings, and the implementations to judge."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import pytest

from mha.conformance.engine.estimate import estimate
from mha.conformance.pytest_plugin.stash import SELECTION, is_benchmark_run
from mha.conformance.ranges import SEED
from mha.conformance.reports.files import validate_file
from mha.conformance.reports.text import describe_changes
from mha.conformance.results import now, versions
from mha.conformance.settings import Settings, by_name, names_of
from mha.conformance.shown import visible_line
from mha.conformance.waivers import expiry_notes, validate_judged
from mha.implementations import Registered, Resolved, discover, resolve
from mha.implementations.discovery.resolve import available
from mha.implementations.process.pristine import torch_changes


@dataclass(frozen=True)
class Selection:
    """What the options select.

    given: the settings of the run. settings: those of each implementation, by name, which may have
        a table of its own.
    implementations: by name, in order. unavailable: the registered ones that could not be loaded.
    torch_changes: as in `Report`. started: when, in UTC.
    """

    given: Settings
    settings: dict[str, Settings]
    implementations: dict[str, Resolved]
    unavailable: tuple[Registered, ...]
    torch_changes: tuple[str, ...]
    started: str

    @property
    def broken(self) -> dict[str, str]:
        """Why registered implementations could not be loaded, though nothing optional lacks."""
        return {entry.name: entry.error for entry in self.unavailable if entry.broken}

    def header(self) -> list[str]:
        """Return the lines that name what is judged, and how."""
        packages = ", ".join(f"{name} {number}" for name, number in versions().items())
        lines = [
            f"judging: {', '.join(self.implementations) or 'nothing'}",
            f"on: {_described(self.given)}",
            f"with: {packages}",
            *self._notes(),
        ]
        for name, each in self.implementations.items():
            if each.inference:
                lines.append(f"inferred: {name}; see `mha check`")
        for entry in self.unavailable:
            lines.append(f"unavailable: {entry.name} ({entry.target}): {entry.error}")
        return list(map(visible_line, lines))

    def _notes(self) -> Iterator[str]:
        """Yield what is special about this run."""
        whole = _described(self.given)
        for name, own in self.settings.items():
            if _described(own) != whole:
                yield f"{name} on: {_described(own)}"
        if self.torch_changes:
            yield f"note: {describe_changes(self.torch_changes)}"
        for name, each in self.implementations.items():
            for note in expiry_notes(self.settings[name].waivers_of(each.implementation), [name]):
                yield f"note: {note}"

    def takes(self, items: int) -> str:
        """Return the line that says about how long it takes to judge so many of the items."""
        claims = [each.implementation.claims for each in self.implementations.values()]
        share = items / max(1, sum(len(own.tasks) for own in self.settings.values()))
        return (
            f"estimate: {estimate(claims, self.given, share)} on one core, if calls are as fast as"
            " the oracle's"
        )


def _described(settings: Settings) -> str:
    """Return where and how is judged, in a line."""
    strict = ", strict: a SHOULD counts as a MUST" if settings.strict else ""
    return f"{', '.join(settings.devices)} in {', '.join(settings.dtypes)}; {settings}{strict}"


def selection(config: pytest.Config) -> Selection:
    """Return what the options select; an invalid option ends the run with status 2."""
    if SELECTION not in config.stash:
        # Spares the interpreter a last garbage collection through all of torch.
        atexit.register(gc.freeze)
        try:
            config.stash[SELECTION] = _select(config)
        except ValueError as error:
            raise pytest.exit.Exception(f"mha: {visible_line(str(error))}", returncode=2) from None
    return config.stash[SELECTION]


def _select(config: pytest.Config) -> Selection:
    """Return what the options select; raise ValueError, in one line, for an invalid option."""
    given = _settings(config)
    registered, resolved = _resolve(config)
    implementations = by_name(resolved)
    _validate_reports(config)
    if config.option.mha_waivers:
        validate_judged(given.waivers, Path(config.option.mha_waivers), implementations)
    settings = {name: given.of_target(each) for name, each in implementations.items()}
    unavailable = tuple(entry for entry in registered if entry.implementation is None)
    return Selection(given, settings, implementations, unavailable, torch_changes(), now())


def _settings(config: pytest.Config) -> Settings:
    """Return the settings; before benchmarks, the default is a quick profile in the first dtype."""
    option, quick = config.option, is_benchmark_run(config)
    if not str(option.mha_seed).isdecimal():
        raise ValueError(
            f"--mha-seed must be a whole number, 0 or more, but is {option.mha_seed!r}"
        )
    if len(option.mha_seed) > len(str(SEED.most)):
        raise ValueError(f"--mha-seed must be {SEED}, but has {len(option.mha_seed)} digits")
    profile = option.mha_profile
    if quick and not profile:
        profile = "quick"
    settings = Settings.of(
        profile or None,
        int(option.mha_seed),
        dtypes=option.mha_dtype or None,
        devices=option.mha_device or None,
        waivers=Path(option.mha_waivers) if option.mha_waivers else None,
        strict=option.mha_strict,
        require=option.mha_require,
        folder=config.invocation_params.dir,
    )
    if quick and not option.mha_dtype:
        return replace(settings, dtypes=settings.dtypes[:1])
    return settings


def _resolve(config: pytest.Config) -> tuple[list[Registered], list[Resolved]]:
    """Return the registered implementations if they were asked for, and those to be judged."""
    targets = list(chain.from_iterable(map(_targets, config.option.mha_impl)))
    if config.option.mha_impl and not targets:
        raise ValueError(
            "--mha-impl is empty; name an implementation, or leave it out to check what is"
            " registered"
        )
    registered: list[Registered] = []
    if "all" in targets:
        registered = discover()
    elif not targets:
        registered = _registered()
    chosen = list(available(registered))
    for target in targets:
        if target != "all":
            chosen += resolve(target)
    return registered, chosen


def _targets(given: str) -> tuple[str, ...]:
    """Return the targets in a text with commas, which the path of a file may have too."""
    return (given,) if Path(given.rpartition(":")[0]).is_file() else names_of(given)


def _registered() -> list[Registered]:
    """Return what other packages have registered; if nothing, the built-in implementations."""
    registered = discover()
    others = [entry for entry in registered if not entry.is_built_in]
    return others or registered


def _validate_reports(config: pytest.Config) -> None:
    for file in config.option.mha_report:
        if is_benchmark_run(config):
            raise ValueError("--mha-report does not apply to benchmarks; use --benchmark-json FILE")
        validate_file(Path(file), "--mha-report")
