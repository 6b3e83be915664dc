"""The public names of the three packages, from their signatures and docstrings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from generated.links import path_of_clause
from mha.conformance.properties.registry import properties
from mha.conformance.results import Rejections, Report, Verdict
from mha.spec import Claims, core

PACKAGES = ("mha.conformance", "mha.implementations", "mha.spec")
# The first line of an item of a list.
_LIST_ITEM = re.compile(r"(\d+\.|-) ")
# In columns: a longer signature has a line for each parameter.
WIDTH = 88


def path_of(package: str) -> str:
    """Return the page of a package."""
    return f"reference/{package.rpartition('.')[2]}.md"


def page(package: str) -> str:
    """Return the page of a package: each public name, in the order of the alphabet."""
    module = importlib.import_module(package)
    parts = [f"# {package}\n", *docstring(module, ()), ""]
    for name in sorted(module.__all__, key=str.lower):
        parts += _entry(name, getattr(module, name))
    return "\n".join(parts)


def bounds() -> str:
    """Return how the bound of the core is derived."""
    return "\n".join(docstring(core, ()))


def report_parts() -> str:
    """Return the sections of a report and its parts."""
    parts: list[str] = []
    for cls in (Report, Verdict, Rejections):
        parts += _entry(cls.__name__, cls)
    return "\n".join(parts)


def claims() -> str:
    """Return all claims, with the clauses that need each of them."""
    parts = list(_entry("Claims", Claims))
    parts += ["## The clauses that need a claim\n", "| claim | clauses |", "|---|---|"]
    needing: dict[str, dict[str, None]] = {}
    for clause, members in properties().items():
        for need in set.intersection(*(set(each.needs) for each in members)):
            needing.setdefault(need, {})[clause] = None
    for need in sorted(needing):
        links = ", ".join(f"[{each}](../{path_of_clause(each)})" for each in needing[need])
        parts.append(f"| `{need.replace('|', ' or ')}` | {links} |")
    return "\n".join([*parts, ""])


def _entry(name: str, value: Any) -> Iterator[str]:
    """Yield the section of a class, a function or another value."""
    yield f"## {name}\n"
    if not callable(value):
        yield f"A {type(value).__name__}.\n"
        return
    if inspect.isclass(value) and issubclass(value, Exception):
        yield f"```python\nclass {name}({value.__base__.__name__})\n```\n"
        yield from docstring(value, ())
        return
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # of an alias of a type
        yield f"```python\n{name} = {value}\n```\n"
        return
    known = set(signature.parameters)
    if dataclasses.is_dataclass(value):
        known.update(field.name for field in dataclasses.fields(value))
    yield f"```python\n{_signature(name, signature)}\n```\n"
    yield from docstring(value, known)
    if inspect.isclass(value):
        yield from _members(value)


def _members(cls: type) -> Iterator[str]:
    """Yield the public methods and properties that a class defines."""
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", member)  # of a static method or a class method
        if isinstance(member, property):
            function = member.fget
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        signature = inspect.signature(function)
        yield f"### {name}\n"
        if not isinstance(member, property):
            yield f"```python\n{_signature(name, signature)}\n```\n"
        yield from docstring(function, set(signature.parameters))


def _signature(name: str, signature: inspect.Signature) -> str:
    """Return a signature as code: in a line, or with a line for each parameter."""
    parameters: list[str] = []
    keyword_only = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parameters.append("*")
        parameters.append(_parameter(parameter))
    result = ""
    if signature.return_annotation not in (signature.empty, None, "None"):
        result = f" -> {_annotation(signature.return_annotation)}"
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) <= WIDTH:
        return line
    lines = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{name}(\n{lines}){result}"


def _parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter with its annotation and its default."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    shown = f"{stars.get(parameter.kind, '')}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        shown += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        shown += f" = {_default(parameter.default)}"
    return shown


def _default(value: Any) -> str:
    """Return a default as code, the same in every build."""
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(repr, value)))}}}" if value else "frozenset()"
    return "..." if repr(value).startswith("<") else repr(value)


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def docstring(value: Any, known: Collection[str]) -> Iterator[str]:
    """Yield the docstring of an object as Markdown; known: its parameters and fields."""
    text = inspect.getdoc(value)
    if text:
        yield from _blocks(text, known)


def _blocks(text: str, known: Collection[str]) -> Iterator[str]:
    """Yield the paragraphs of a docstring, its lists of parameters and its examples."""
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        first, *rest = paragraph.split("\n")
        is_indented = bool(rest) and all(line.startswith("    ") for line in rest)
        if first.startswith(">>>"):
            yield f"```pycon\n{paragraph}\n```\n"
        elif first.startswith("    "):
            yield f"```text\n{textwrap.dedent(paragraph)}\n```\n"
        elif first.endswith(":") and is_indented and not _names_in(first, known):
            yield f"**{first.removesuffix(':')}**\n"
            yield from _blocks(textwrap.dedent("\n".join(rest)), known)
        else:
            yield from _paragraph(paragraph.split("\n"), known)


def _paragraph(lines: list[str], known: Collection[str]) -> Iterator[str]:
    """Yield a paragraph, and the list of what follows in it, each item at a line of its own."""
    prose: list[str] = []
    items: dict[str, list[str]] = {}
    current = prose
    for line in lines:
        names = _names_in(line, known)
        if names:
            current = items[names] = [line.partition(":")[2].strip()]
        elif _LIST_ITEM.match(line):
            current.append(f"\n{line}")
        else:
            current.append(line.strip())
    if prose:
        yield f"{_escaped(' '.join(prose))}\n"
    if items:
        listed = []
        for names, texts in items.items():
            listed.append(f"- `{names}`: {_escaped(' '.join(texts))}")
        yield "\n".join(listed) + "\n"


def _names_in(line: str, known: Collection[str]) -> str:
    """Return the parameters that a line is about, as in "query, key: (B, L, D)"; or ""."""
    head, colon, _ = line.partition(":")
    names = [name.strip().lstrip("*") for name in head.split(",")]
    if colon and not line.startswith(" ") and all(name in known for name in names):
        return ", ".join(names)
    return ""


def _escaped(text: str) -> str:
    """Return a text in whose prose no character is taken for markup."""
    parts = re.split(r"(`[^`]*`)", text)  # code is at the odd places
    parts[::2] = [re.sub(r"([*_<[])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
