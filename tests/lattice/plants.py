"""Faults planted into the source of right classes, one at a time, and the clauses that fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lattice.axes import Point
from lattice.words import INPUT_NAMES

Change = Callable[[Point, str], str | None]


@dataclass(frozen=True)
class Plant:
    """A fault: `change` returns the source with it, or None where a point has no place for it.

    clauses: one of them, at least, must fail. wrong: whether results in evaluation mode differ from
    the oracle's.
    """

    name: str
    clauses: tuple[str, ...]
    change: Change
    wrong: bool = True


PLANTS: list[Plant] = []


def plant(*clauses: str, wrong: bool = True) -> Callable[[Change], Change]:
    """Register a fault under the name of the function."""

    def register(change: Change) -> Change:
        PLANTS.append(Plant(change.__name__, clauses, change, wrong))
        return change

    return register


def _after_split(source: str, line: str) -> str:
    """Insert a line of `forward` after q, k and v are set."""
    lines = source.splitlines()
    sets = r" +(q|k|v|q, k, v|k, v) = (?!.*reshape)"
    end = next((i for i, text in enumerate(lines) if "def decode" in text), len(lines))
    last = max(index for index, text in enumerate(lines[:end]) if re.match(sets, text))
    indent = re.match(" *", lines[last]).group()  # type: ignore[union-attr]  # it matches
    indent = " " * 8 if len(indent) > 8 else indent
    return "\n".join([*lines[: last + 1], indent + line, *lines[last + 1 :]]) + "\n"


def _before(source: str, pattern: str, line: str) -> str:
    """Insert a line before the first one that matches a pattern, with its indentation."""
    return re.sub(
        rf"(?m)^( *)(?={pattern})", lambda found: f"{found[1]}{line}\n{found[1]}", source, count=1
    )


@plant("CAU-1", "CAU-2", "CAU-3", "CAU-5")
def sees_the_next_key(point: Point, source: str) -> str | None:
    """The causal mask lets a query see one key more."""
    return source.replace(".tril()", ".tril(1)").replace(".tril(S - L)", ".tril(S - L + 1)")


@plant("CAU-3")
def other_alignment(point: Point, source: str) -> str | None:
    """The causal mask is aligned at the other end."""
    if point.self_attention or point.causal == "none":
        return None
    if point.causal == "buffer":
        return source.replace(
            "self.tril[:L, :S]", "self.tril[:S, :S][S - L :] if S > L else self.tril[:L, :S]"
        )
    return (
        source.replace(".tril()", ".tril(S - L)")
        if ".tril()" in source
        else source.replace(".tril(S - L)", ".tril()")
    )


@plant("MSK-1", "MSK-6", "MSK-7", "EQV-1")
def mask_of_the_first_item(point: Point, source: str) -> str | None:
    """The mask of the first item counts for all."""
    if not point.per_item or "[:, None, None]" not in source:
        return None
    return source.replace("[:, None, None]", "[:1, None, None]")


@plant("MSK-6", "MSK-1")
def mask_of_the_first_head(point: Point, source: str) -> str | None:
    """The mask of the first head counts for all."""
    if point.shape not in ("(b h) l s", "b h l s") or point.mask == "none":
        return None
    name = {"additive": "bias"}.get(point.mask, "allowed")
    found = re.search(rf"(?m)^( +)({name} = .*  # (True|0|1).*)$", source)
    return found and source.replace(found[0], f"{found[0]}\n{found[1]}{name} = {name}[:, :1]")


@plant("HED-1", "HED-4")
def heads_not_split(point: Point, source: str) -> str | None:
    """The columns of the heads are interleaved."""
    return re.sub(
        r"view\(B, (\w), ([\w.]+), self\.head_dim\)\.transpose\(1, 2\)",
        r"view(B, \1, self.head_dim, \2).permute(0, 3, 1, 2)",
        source,
        count=1,
    )


@plant("HED-1", "EQV-4", "EQV-3", "NUM-1", "EQV-6")
def last_value_doubled(point: Point, source: str) -> str | None:
    """The value of the last key is doubled."""
    return _after_split(source, "v = torch.cat([v[:, :, :-1], 2 * v[:, :, -1:]], 2)")


@plant("HED-1", "NUM-1", "EQV-3", "EQV-7", "NUM-5")
def last_key_dropped(point: Point, source: str) -> str | None:
    """From 17 keys on, the value of the last one is dropped."""
    return _after_split(
        source, "v = torch.cat([v[:, :, :-1], 0 * v[:, :, -1:]], 2) if S > 16 else v"
    )


@plant("SMX-6", "HED-1")
def scaled_by_the_model(point: Point, source: str) -> str | None:
    """The scale is that of the model's width."""
    if point.heads == "wide":
        return None
    changed = source.replace("math.sqrt(self.head_dim)", "math.sqrt(self.d_model)")
    changed = changed.replace("self.scale = self.head_dim**", "self.scale = self.d_model**")
    return re.sub(r"(q|k) \* self\.head_dim\*\*", r"\1 * self.d_model**", changed)


@plant("SMX-6", "HED-1")
def scale_forgotten(point: Point, source: str) -> str | None:
    """The scores are not scaled."""
    changed = source.replace(" / math.sqrt(self.head_dim)", "").replace(
        "1 / math.sqrt(self.head_dim)", "1.0"
    )
    return changed.replace("self.scale = self.head_dim**-0.5", "self.scale = 1.0")


@plant("SMX-1", "SMX-2", "HED-1")
def softmax_over_queries(point: Point, source: str) -> str | None:
    """The softmax runs over the queries."""
    return source.replace("scores.softmax(-1)", "scores.softmax(-2)").replace(
        "logsumexp(-1,", "logsumexp(-2,"
    )


@plant("MSK-1", "MSK-2", "MSK-3", "MSK-7")
def mask_upside_down(point: Point, source: str) -> str | None:
    """Masked keys are seen, and the others are not."""
    changed = re.sub(r"(allowed = (?:allowed & )?)~(.*  # True = masked)", r"\1\2", source)
    if changed != source:
        return changed
    changed = re.sub(r"(allowed = (?:allowed & )?)(.*  # True = attend)", r"\1~\2", source)
    if changed == source and point.mask == "numbers":
        return re.sub(
            r"(!=|==) 0(?=\)?  # )", lambda found: "== 0" if found[1] == "!=" else "!= 0", source
        )
    return changed


@plant("MSK-1", "MSK-2", "MSK-3", "MSK-7")
def mask_ignored(point: Point, source: str) -> str | None:
    """The mask is checked, and not used."""
    if point.mask == "additive":
        return source.replace("scores = scores + bias", "pass")
    return re.sub(r"(?m)^( +)allowed = .*  # (True|1) = .*$", r"\1pass", source)


@plant("HED-1", "HED-5", "EQV-6", "NUM-1")
def output_bias_forgotten(point: Point, source: str) -> str | None:
    """The output projection leaves out its bias."""
    if point.bias == "none" or point.bias == "qkv":
        return None
    changed = re.sub(
        r"output = self\.([\w\[\]]+)\(context\)",
        r"output = F.linear(context, self.\1.weight)",
        source,
    )
    if point.projection == "conv1d":
        changed = source.replace(
            "output = self.c_proj(context)", "output = context @ self.c_proj.weight"
        )
    changed = re.sub(r"output = output \+ self\.b_[oO]", "pass", changed)
    if changed == source:
        return None
    if "import torch.nn.functional" not in changed:
        changed = changed.replace(
            "import torch\n", "import torch\nimport torch.nn.functional as F\n", 1
        )
    return changed


@plant("HED-1", "HED-4", "HED-5")
def heads_in_reverse(point: Point, source: str) -> str | None:
    """The heads are concatenated in reverse, before W_o."""
    if "context.transpose(1, 2)" in source:
        return source.replace("context.transpose(1, 2)", "context.flip(1).transpose(1, 2)")
    return source.replace('"bhle,hed->bld", context,', '"bhle,hed->bld", context.flip(1),')


@plant("DRP-1", "STA-6", "PTH-2", wrong=False)
def dropout_in_evaluation(point: Point, source: str) -> str | None:
    """Dropout is active in evaluation too."""
    changed = source.replace(" if self.training else 0.0", "")
    changed = re.sub(r"self\.dropout\(([\w\[\]-]+)\)", r"F.dropout(\1, self.dropout.p)", changed)
    changed = re.sub(
        r"self\.output_dropout\(output\)", "F.dropout(output, self.output_dropout.p)", changed
    )
    if changed != source and "import torch.nn.functional" not in changed:
        changed = changed.replace(
            "import torch\n", "import torch\nimport torch.nn.functional as F\n", 1
        )
    return changed


@plant("HED-1", "EQV-9", "EQV-4", "NUM-1")
def key_for_value(point: Point, source: str) -> str | None:
    """The key stands in for the value."""
    return _after_split(source, "v = k")


@plant("GRD-1", wrong=False)
def no_gradient_to_the_query(point: Point, source: str) -> str | None:
    """The query is cut out of the backward pass."""
    return _after_split(source, "q = q.detach()")


@plant("GRD-1", wrong=False)
def half_of_the_gradient(point: Point, source: str) -> str | None:
    """The value gets half of its gradient."""
    return _after_split(source, "v = v / 2 + v.detach() / 2")


@plant("STA-1", "STA-2", "STA-3", wrong=False)
def input_changed(point: Point, source: str) -> str | None:
    """The first input is changed in place, after it has been read."""
    name = INPUT_NAMES[point.inputs][0]
    return _before(source, rf"{name}\.dim|if {name}\.", f"{name}.mul_(1.0)").replace(
        f"{name}.mul_(1.0)", f"{name}.detach().mul_(1.0)"
    )


@plant("STA-3", wrong=False)
def remembers_the_first_mask(point: Point, source: str) -> str | None:
    """The mask of the first call is kept for those of the same shape."""
    name = "bias" if point.mask == "additive" else "allowed"
    if not point.masked or point.core == "sdpa":
        return None
    lines = [
        (
            f'if getattr(self, "kept", None) is None or {name} is None or self.kept.shape !='
            f" {name}.shape:"
        ),
        f"    self.kept = {name}",
        f"{name} = self.kept",
    ]
    for line in reversed(lines):
        source = _after_split(source, line)
    return source


@plant("NUM-1", "HED-1", "SMX-2")
def scores_in_bfloat16(point: Point, source: str) -> str | None:
    """The scores are rounded to bfloat16."""
    return source.replace("def weigh(self, scores", "def weigh(self, scores", 1).replace(
        "weights = scores.softmax(-1)", "weights = scores.bfloat16().to(scores.dtype).softmax(-1)"
    )


@plant("MSK-8", "MSK-9")
def empty_rows_are_nan(point: Point, source: str) -> str | None:
    """A row without a key is NaN."""
    if point.fill not in ("rescued", "spread") or not point.may_be_empty:
        return None
    return source.replace("scores = scores.masked_fill(empty, 0.0)", "pass").replace(
        "weights = weights.masked_fill(empty, 0.0)", "pass"
    )


@plant("SMX-1", "SMX-2", "NUM-1", "HED-1")
def sum_with_an_epsilon(point: Point, source: str) -> str | None:
    """The rows of weights sum to a little less than 1."""
    return source.replace(
        "weights = scores.softmax(-1)", "weights = scores.softmax(-1) / (1 + 1e-5)"
    )


@plant("HED-1", "SHP-4", "EQV-1", "NUM-1")
def merged_without_transposing(point: Point, source: str) -> str | None:
    """The contexts are merged with heads and queries in the wrong order."""
    return source.replace("context = context.transpose(1, 2).reshape", "context = context.reshape")


@plant("CFG-1", "CFG-2", wrong=False)
def width_unchecked(point: Point, source: str) -> str | None:
    """A width that the heads do not divide is accepted, until a call fails to divide it."""
    if point.heads != "equal":
        return None
    return source.replace(" or d_model % n_heads:", ":")


@plant("MSK-12", wrong=False)
def mask_dtype_unchecked(point: Point, source: str) -> str | None:
    """A mask of integers is taken as something."""
    if point.mask not in ("keep", "drop") or point.core == "sdpa":
        return None
    return re.sub(
        r"(?m)^( +)(if \w+\.dtype != torch\.bool:)\n( +raise TypeError.*)$", r"\1pass", source
    ).replace("(~allowed", "(~allowed.bool()")


@plant("STA-6", "PTH-2", wrong=False)
def training_differs(point: Point, source: str) -> str | None:
    """In training the scores are a little larger."""
    return _after_split(source, "q = q * 1.001 if self.training else q")
