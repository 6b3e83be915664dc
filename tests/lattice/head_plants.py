"""Faults planted into norms, rotations, decoding and windows; see `plants`."""

from __future__ import annotations

import re

from lattice.axes import Point
from lattice.plants import plant

# Faults of what is declared: without a declaration, decoding is not judged, and an option of a
# constructor that is not a window is left out, as it may be kept for others.
OF_HEAD_DECLARATION = (
    "positions_restart",
    "cached_keys_are_turned_again",
    "chunk_sees_later_tokens",
    "built_window_of_one_more",
    "built_window_ignored",
)
TURNS = re.compile(r"(q, k = )(self\.turn\(q.*?\)), (self\.turn\(k.*?\))$", re.MULTILINE)
NORMS = re.compile(
    r"(q, k = )((?:self\.q_norm|F\.\w+_norm)\(q.*), ((?:self|F)\.\w+_norm\(k.*)$", re.M
)


def _leaving_k(pattern: re.Pattern[str], source: str) -> str:
    """Return the source that does to q only what a pattern of lines says."""
    return pattern.sub(lambda found: f"{found[1]}{found[2]}, k", source)


@plant("ROT-1", "HED-1")
def key_not_rotated(point: Point, source: str) -> str | None:
    """Only the query is rotated."""
    return _leaving_k(TURNS, source)


@plant("ROT-1", "HED-1")
def value_rotated(point: Point, source: str) -> str | None:
    """The value is rotated too."""
    if not point.turns:
        return None
    return TURNS.sub(lambda m: f"{m[0]}\n        v = {m[3].replace('(k', '(v')}", source)


@plant("ROT-1", "HED-1")
def key_in_other_pairs(point: Point, source: str) -> str | None:
    """The key's columns are interleaved where the query's are in halves, or the other way."""
    if point.part != "whole" or not TURNS.search(source):
        return None
    halves = ".unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)"
    neighbours = ".unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2)"
    if point.rotary in ("interleaved", "complex"):
        halves, neighbours = neighbours, halves
    found = TURNS.search(source)
    assert found
    turned = found[3].replace("(k", f"(k{neighbours}", 1) + halves
    # Width 2 has one pair, in which both ways are one.
    return TURNS.sub(lambda m: f"{m[1]}{m[2]}, {turned}", source)


@plant("ROT-1", "HED-1")
def key_of_another_base(point: Point, source: str) -> str | None:
    """The base for the key is another one than for the query."""
    if point.tables not in ("inside", "places") or point.rotary == "none":
        return None
    source = re.sub(r"(def turn\(self, x, .*)\):", r"\1, times=1.0):", source)
    source = source.replace("self.rope_theta**-", "(times * self.rope_theta) ** -")
    return TURNS.sub(lambda m: f"{m[1]}{m[2]}, {m[3][:-1]}, times=4.0)", source)


@plant("ROT-1", "HED-1")
def key_positions_from_one(point: Point, source: str) -> str | None:
    """The positions of the keys count from 1."""
    if not point.turns or point.decode != "none" or point.tables == "buffer":
        return None
    return source.replace("self.turn(k)", "self.turn(k, 1)")


@plant("ROT-1", "HED-1")
def frequencies_of_the_whole_head(point: Point, source: str) -> str | None:
    """Frequencies of a part of a head are those of the whole head."""
    return source.replace("/ self.rotary_dim", "/ self.head_dim") if point.part != "whole" else None


@plant("ROT-1", "HED-1")
def frequencies_in_bfloat16(point: Point, source: str) -> str | None:
    """Frequencies are rounded to bfloat16, as with a module that is cast to it."""
    return source.replace("self.inv_freq.to(", "self.inv_freq.bfloat16().to(")


@plant("ROT-1")
def positions_in_bfloat16(point: Point, source: str) -> str | None:
    """Positions are counted in bfloat16, where 257 is 256."""
    changed = source.replace("places.to(x.dtype)", "places.bfloat16().to(x.dtype)")
    changed = changed.replace("None].to(x.dtype) *", "None].bfloat16().to(x.dtype) *")
    return changed.replace(
        "torch.arange(max_len).float()", "torch.arange(max_len).bfloat16().float()"
    )


@plant("ROT-1", "HED-1")
def tables_in_another_order(point: Point, source: str) -> str | None:
    """Tables of one convention of pairs are read by the other one."""
    if point.tables not in ("cos_sin", "pair") or point.part != "whole":
        return None
    if point.rotary == "interleaved":
        order = ".unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)"
    else:
        order = ".unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2)"
    return source.replace(
        "return x * cos", f"cos, sin = cos{order}, sin{order}\n    return x * cos"
    )


@plant("ROT-1", "INC-1", "INC-2", wrong=False)
def positions_restart(point: Point, source: str) -> str | None:
    """With a cache, positions count from 0 again."""
    return source.replace("self.turn(q, start), self.turn(k, start)", "self.turn(q), self.turn(k)")


@plant("ROT-1", "INC-1", "INC-2", wrong=False)
def cached_keys_are_turned_again(point: Point, source: str) -> str | None:
    """The whole cache is rotated in each step."""
    if point.decode == "none" or not point.turns:
        return None
    return source.replace("cache, S = (k, v)", "k = self.turn(k)\n        cache, S = (k, v)")


@plant("INC-2", wrong=False)
def chunk_sees_later_tokens(point: Point, source: str) -> str | None:
    """A token sees the later ones of its chunk."""
    return source.replace('scores = scores.masked_fill(~earlier, float("-inf"))', "pass")


@plant("QKN-1", "HED-1")
def key_not_normed(point: Point, source: str) -> str | None:
    """Only the query is normed."""
    if point.over == "width":
        return re.sub(r"self\.k_norm\((.*?\(.*?\))\)", r"\1", source)
    return _leaving_k(NORMS, source)


@plant("QKN-1", "HED-1")
def key_normed_at_another_place(point: Point, source: str) -> str | None:
    """The key is normed before its rotation in place of after it, or the other way."""
    if point.norm == "rms" and point.norm_weight == "none":
        return None  # a rotation keeps the root mean square
    norm, turn = NORMS.search(source), TURNS.search(source)
    if not (norm and turn):
        return None
    exchanged = source.replace(turn[0], f"{turn[1]}{turn[2]}, {norm[3]}", 1)
    return exchanged.replace(norm[0], f"{norm[1]}{norm[2]}, {turn[3]}", 1)


@plant("QKN-1", "HED-1")
def norm_of_all_heads_at_once(point: Point, source: str) -> str | None:
    """The root mean square is that of all heads."""
    if point.over == "width":
        return None
    return source.replace("x.pow(2).mean(-1, keepdim=True)", "x.pow(2).mean((1, -1), keepdim=True)")


@plant("QKN-1")
def eps_left_out(point: Point, source: str) -> str | None:
    """Rows of zeros are divided by zero."""
    source = source.replace(".mean(-1, keepdim=True) + self.eps)", ".mean(-1, keepdim=True))")
    return re.sub(r"\beps=(self\.norm_eps|norm_eps|1e-[56])\)", "eps=0.0)", source)


@plant("QKN-1", "HED-1")
def key_has_the_weight_of_the_query(point: Point, source: str) -> str | None:
    """One weight is taken for both norms."""
    if point.over == "width":
        return None
    return source.replace("self.k_norm(k)", "self.q_norm(k)")


@plant("WIN-1", "EFF-1")
def window_of_one_more(point: Point, source: str) -> str | None:
    """The window has one key too many."""
    if not point.window.startswith("call"):
        return None
    changed = source.replace("(distances > -sliding", "(distances >= -sliding")
    return changed.replace("(distances >= -left)", "(distances > -left - 2)")


@plant("WIN-1", "EFF-1")
def window_ignored(point: Point, source: str) -> str | None:
    """The window is taken, and has no effect."""
    if not point.window.startswith("call"):
        return None
    return re.sub(r"allowed = allowed & \(distances .*", "pass", source)


@plant("WIN-1", "EFF-1")
def built_window_of_one_more(point: Point, source: str) -> str | None:
    """The window of a constructor has one key too many."""
    if not point.window.startswith("built"):
        return None
    changed = source.replace("(distances > -self", "(distances >= -self")
    return changed.replace(
        "(distances >= -self.window_left)", "(distances > -self.window_left - 2)"
    )


@plant("WIN-1", "EFF-1")
def built_window_ignored(point: Point, source: str) -> str | None:
    """The window of a constructor has no effect."""
    if not point.window.startswith("built"):
        return None
    return re.sub(r"allowed = allowed & \(distances .*", "pass", source)


@plant("WIN-1")
def window_counts_from_the_other_end(point: Point, source: str) -> str | None:
    """Places of queries count from the other end than the causal mask's."""
    if point.self_attention or not point.window.startswith("call"):
        return None
    if " - (S - L)" in source:
        return source.replace(" - (S - L)", "")
    return re.sub(r"(distances = torch\.arange\(S, .*?\)) -", r"\1 - (S - L) -", source)
