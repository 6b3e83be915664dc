"""Which cases a kernel is tried on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from mha.conformance.embedded.cases import TILE, KernelCase
from mha.conformance.embedded.order import ORDER
from mha.spec.claims import Claims, smallest_from

# Half precision comes first: that is what kernels are written for, and where little is seen.
DTYPES = ("bfloat16", "float32", "float16", "float64")
# So many cases are tried in both dtypes at once; of the others, the second dtype comes last.
IN_BOTH = 8
# Of each kind of mask, its form, and the axes of (B, H, L) in which it differs.
MASKS = {
    "padding": ("bool", (0,)),
    "sorted": ("bool", (0,)),
    "random": ("bool", (0, 2)),
    "rows": ("bool", (0, 2)),
    "first": ("bool", ()),
    "each head": ("bool", (0, 1, 2)),
    "whole heads": ("bool", (1,)),
    "bias": ("float", (0, 2)),
    "heads": ("float", (0, 1, 2)),
    "empty item": ("float", (0, 2)),
}
# The claim that masks may differ in each axis.
DIFFER = ("per_item_mask", "per_head_mask", "per_query_mask")
# Those that leave rows without a key.
WITH_EMPTY_ROWS = ("rows", "whole heads", "empty item")
OF_PREFIXES = ("padding", "sorted")


def kernel_cases(claims: Claims, *, seed: int = 0, budget: int | None = None) -> list[KernelCase]:
    """Return the cases that a kernel with these claims is tried on, the most telling first.

    They are the same for the same arguments, on every machine, and are made without Hypothesis;
    `KernelCase.build` makes their tensors.

    claims: what the kernel supports; there is no case of anything else.
    seed: of the numbers in them.
    budget: how many cases at most; all by default.

    >>> cases = kernel_cases(Claims(projections=False, dtypes={"bfloat16"}), budget=3)
    >>> [case.clause for case in cases]
    ['NUM-1', 'MSK-8', 'MSK-5']
    """
    dtypes = [name for name in DTYPES if name in claims.dtypes][:2]
    planned = [case for case in _planned(claims) if _is_claimed(case, claims)]
    cases = list[KernelCase]()
    for number, case in enumerate(planned):
        for dtype in dtypes[: 2 if _is_short(case) else 1]:
            fitted = _fitted(replace(case, dtype=dtype, seed=seed * 1000 + number), claims)
            if fitted is not None and fitted not in cases:
                cases.append(fitted)
    cases.sort(key=lambda case: _order(case, is_second=case.dtype != dtypes[0]))
    return cases[:budget]


def _order(case: KernelCase, *, is_second: bool) -> tuple[bool, int]:
    """Return the order of a case: what its second dtype finds, its first cases find."""
    place = _place(case)
    return is_second and place >= IN_BOTH, place


def _place(case: KernelCase) -> int:
    """Return where a case comes among those of its dtype; what was not measured comes last."""
    title = f"{case.clause}: {case.about}"
    return ORDER.index(title) if title in ORDER else len(ORDER)


def _is_short(case: KernelCase) -> bool:
    """Return whether a case costs little, so that it is tried in a second dtype too."""
    return case.B * case.H * case.L * case.S < 1 << 17


def _planned(claims: Claims) -> Iterator[KernelCase]:
    """Yield the cases of everything that may be claimed, in the order of their numbers."""
    yield from _first(claims)
    yield from _of_options(claims)
    yield from _of_values()
    yield from _of_masks()
    yield from _of_windows(claims)
    yield from _of_sizes()
    yield from _of_chunks(claims)
    # Last, so that none of the others gets other numbers.
    yield from _of_pairs(claims)
    yield from _of_broadcast_masks()
    yield from _of_rare_calls(claims)


def _first(claims: Claims) -> Iterator[KernelCase]:
    """Yield a case of each family: what most wrong kernels fail."""
    plain = KernelCase(
        clause="NUM-1", about="plain: more keys than a tile", B=2, H=4, L=65, S=130, d=64
    )
    yield plain
    about = "Gaussian numbers: do the errors add up to a defect?"
    rows = replace(plain, clause="NUM-7", about=about, values="normal", B=4, H=8, L=33, S=33, d=32)
    alignment = claims.causal or "top_left"
    causal = replace(plain, causal=True, alignment=alignment)
    yield replace(causal, clause="CAU-2", about="causal: a tile and one more", L=129, S=129, H=2)
    grouped = replace(plain, clause="GQA-1", about="heads share keys", H=12, H_kv=3, L=17)
    yield grouped
    yield rows
    yield replace(causal, clause="CAU-3", about="causal: fewer queries than keys", L=33, S=100)
    yield replace(plain, clause="MSK-1", about="a mask of each query", mask="random", L=33, S=65)


def _of_options(claims: Claims) -> Iterator[KernelCase]:
    """Yield a case of each option of the scores, with little else."""
    alignment = claims.alignment or "top_left"
    base = KernelCase(clause="SCL-1", H=4, L=33, S=100, alignment=alignment)
    yield replace(base, about="a scale of its own", scale=0.31)
    for sinks in ("mixed", "zero"):
        yield replace(base, clause="SNK-1", about=f"sinks: {sinks}", sinks=sinks)
    for window in ((16, 0), (7, 3)):
        about = "a window, its ends inside a tile"
        yield replace(base, clause="WIN-1", about=about, window=window, L=100)
    yield replace(base, clause="CAP-1", about="a cap below the scores", softcap=3.0)
    yield replace(base, clause="ALB-1", about="slopes", slopes=True, values="normal", L=100)
    yield replace(base, clause="CAP-1", about="a cap and a mask", softcap=5.0, mask="bias")
    yield replace(base, clause="CAP-3", about="a cap far above", softcap=1000.0, L=9)
    yield replace(base, clause="CAP-3", about="a cap of 1/100 of the scores", softcap=0.1, L=9)
    yield replace(base, clause="LSE-1", about="log-sum-exp of large scores", values="large", L=9)
    yield replace(base, clause="SCL-1", about="a negative scale", scale=-0.2, L=9)


def _of_values() -> Iterator[KernelCase]:
    """Yield cases of numbers on which the usual tests are never tried."""
    base = KernelCase(clause="NUM-1", H=2, L=33, S=130, d=64)
    yield replace(
        base, clause="NUM-5", about="many keys", B=1, H=2, L=16, S=4099, d=32, values="targets"
    )
    yield replace(base, clause="SMX-4", about="scores in the hundreds", values="large")
    about = "scores in the hundreds, in long rows"
    yield replace(base, clause="NUM-5", about=about, values="large", B=1, L=4, S=2100, d=32)
    yield replace(base, about="one large key among many small ones", values="one_large", S=300)
    yield replace(base, about="one small key among many large ones", values="one_small", S=300)
    about = "a first tile that is masked, all scores far below 0"
    yield replace(base, clause="MSK-1", about=about, values="low", mask="first")
    yield replace(base, clause="SMX-3", about="all scores far below 0", values="low")
    yield replace(base, clause="NUM-6", about="heavy tails", values="heavy")
    yield replace(base, about="values with a common offset", values="offset")
    yield replace(base, about="Gaussian numbers", values="normal", L=65)


def _of_masks() -> Iterator[KernelCase]:
    """Yield cases of masks, and of rows that they leave without a key."""
    base = KernelCase(clause="MSK-1", H=2, L=33, S=65)
    yield replace(base, clause="MSK-3", about="padding", mask="padding")
    yield replace(base, clause="MSK-8", about="rows without a key", mask="rows")
    yield replace(base, clause="MSK-11", about="a float mask", mask="bias")
    about = "more than 256 items times heads, each with a mask of its own"
    yield replace(base, clause="MSK-6", about=about, mask="heads", B=33, H=8, L=5, S=17)
    about = "causal and padding, which hides keys that the causal mask shows"
    causal = replace(base, clause="CAU-4", about=about, causal=True, B=3, L=65)
    yield replace(causal, mask="padding")
    yield replace(base, about="one query with a mask", mask="random", L=1)
    yield replace(base, clause="MSK-8", about="one key, hidden from some", mask="rows", S=1, L=7)
    about = "wide heads, long rows, and rows without a key"
    yield replace(base, clause="MSK-8", about=about, mask="rows", d=128, S=1030, L=7, B=1)
    for items, heads in ((66, 2), (2, 64), (17, 16)):
        about = f"{items} items of {heads} heads, each with a mask of its own"
        many = replace(base, clause="MSK-6", about=about, B=items, H=heads, L=3, S=9, d=16)
        yield replace(many, mask="heads")
        yield replace(many, mask="random")


def _of_windows(claims: Claims) -> Iterator[KernelCase]:
    """Yield windows of a tile and one more or less, and those that end beyond the keys."""
    base = KernelCase(clause="WIN-1", H=2, L=150, S=150, alignment=claims.alignment or "top_left")
    for left in (TILE - 1, TILE, TILE + 1):
        yield replace(base, about=f"{left} keys before", window=(left, 0), causal=True)
    yield replace(base, about="only its own key", window=(0, 0))
    yield replace(base, clause="WIN-2", about="all keys", window=(200, 200), L=33, S=65)
    yield replace(base, about="more queries than keys", window=(5, 70), L=100, S=65)
    yield replace(base, about="without a bound before", window=(None, 2), L=65, S=65)
    yield replace(base, about="with sinks", window=(9, 0), sinks="mixed", L=65, S=65, H=4)


def _of_sizes() -> Iterator[KernelCase]:
    """Yield cases of sizes at the edges of tiles, of heads, and of one."""
    base = KernelCase(clause="NUM-1", H=2, L=33, S=65)
    yield replace(base, clause="HED-1", about="five heads, one query", H=5, L=1, S=77)
    yield replace(base, clause="VAL-1", about="values of another width", d=128, d_v=96, L=9)
    yield replace(base, clause="SHP-4", about="sizes of one", B=1, H=1, L=1, S=1)
    for keys in (TILE - 1, TILE, 2 * TILE - 1, 2 * TILE + 1):
        yield replace(base, about=f"{keys} keys", S=keys, L=keys % 33 + 1)
    yield replace(base, clause="SHP-7", about="keys expanded over the batch", expanded=True, B=3)
    yield replace(base, about="a head of 256", d=256, L=9)
    yield replace(base, about="a head of an odd width", d=7, L=9)
    yield replace(base, about="a head of one column", d=1, L=9)
    yield replace(base, about="a head of 320", d=320, L=5)
    yield replace(base, clause="GQA-1", about="one key head for all", H=6, H_kv=1, L=9)
    yield replace(base, clause="GQA-1", about="as many groups as heads in one", H=8, H_kv=4, L=9)
    yield replace(base, clause="GQA-1", about="eight heads in a group", H=16, H_kv=2, L=9)
    for keys in (2 * TILE, 4 * TILE):
        yield replace(base, about=f"{keys} keys: whole tiles", S=keys, L=17)
    yield replace(base, clause="SHP-7", about="heads in longer rows", strided=True, L=65)
    yield replace(base, about="more than 256 items times heads", B=33, H=8, L=5, S=17)
    yield replace(
        base, clause="CAU-2", about="causal: two tiles of 128 and one", causal=True, L=257, S=257
    )


def _of_chunks(claims: Claims) -> Iterator[KernelCase]:
    """Yield chunks smaller than a tile, of a tile and one more or less, and of all places."""
    base = KernelCase(
        clause="CHK-1",
        H=2,
        L=150,
        S=150,
        # Some kernels refuse chunks in other calls.
        causal=claims.causal is not None,
        alignment=claims.alignment or "top_left",
    )
    for chunk in (16, TILE - 1, TILE, TILE + 1):
        yield replace(base, about=f"chunks of {chunk} places", chunk=chunk)
    yield replace(base, about="chunks, fewer queries than keys", chunk=20, L=33, S=100)
    yield replace(base, about="one chunk of all places", chunk=1 << 20, L=65, S=65)


def _of_pairs(claims: Claims) -> Iterator[KernelCase]:
    """Yield pairs of options, of which a kernel may forget one beside the other."""
    base = KernelCase(clause="MSK-1", H=4, alignment=claims.alignment or "top_left")
    yield replace(base, about="a mask beside a window", mask="random", window=(9, 3))
    yield replace(base, about="a mask beside chunks", mask="random", chunk=16)
    yield replace(base, clause="MSK-3", about="padding beside sinks", mask="padding", sinks="mixed")
    yield replace(base, clause="MSK-3", about="padding beside slopes", mask="padding", slopes=True)
    grouped = replace(base, H=6, H_kv=3)
    yield replace(grouped, clause="SNK-1", about="sinks of heads that share keys", sinks="mixed")
    yield replace(grouped, clause="ALB-1", about="slopes of heads that share keys", slopes=True)
    yield replace(grouped, clause="WIN-1", about="a window, heads share keys", window=(9, 3))
    yield from _of_two_options(base)
    rows = replace(base, about="sinks, in rows without a key too", mask="rows", sinks="mixed")
    yield replace(rows, clause="SNK-1")


def _of_two_options(base: KernelCase) -> Iterator[KernelCase]:
    """Yield each pair of options of the scores."""
    options: dict[str, tuple[str, dict[str, Any]]] = {
        "a window": ("WIN-1", {"window": (9, 3)}),
        "chunks": ("CHK-1", {"chunk": 16}),
        "a cap": ("CAP-1", {"softcap": 3.0}),
        "sinks": ("SNK-1", {"sinks": "mixed"}),
        "slopes": ("ALB-1", {"slopes": True}),
    }
    for (one, (_, given)), (other, (clause, beside)) in combinations(options.items(), 2):
        yield replace(base, clause=clause, about=f"{other} beside {one}", **given, **beside)


def _of_broadcast_masks() -> Iterator[KernelCase]:
    """Yield masks of size 1 in some axes, or of fewer dimensions, which save memory."""
    base = KernelCase(clause="MSK-5", L=65)
    about = "padding as a row of keys for each item, the first of which has none"
    yield replace(base, about=about, mask="sorted", mask_once=(1, 2), B=3)
    rows = replace(base, about="a row of keys for each item and head", mask_once=(2,), L=33)
    yield replace(rows, mask="each head")
    yield replace(rows, mask="heads")
    yield replace(base, about="one mask for all items", mask="random", mask_once=(0,), L=33)
    flat = replace(base, mask="random", mask_once=(0, 1), mask_rank=2, L=33)
    yield replace(flat, about="a mask of queries and keys only")
    of_heads = replace(base, mask="each head", mask_once=(0,), mask_rank=3, L=33)
    yield replace(of_heads, about="a mask of heads, queries and keys")
    yield replace(base, about="whole heads are hidden", mask="whole heads", mask_once=(0, 2, 3))
    about = "an added row of keys for each item, one of which has none"
    yield replace(base, clause="MSK-8", about=about, mask="empty item", mask_once=(2,))
    about = "an item of 66 heads, each with a mask of its own"
    yield replace(base, clause="MSK-6", about=about, mask="heads", B=1, H=66, L=3, S=9, d=16)
    about = "rows without a key, in a call without gradients"
    yield replace(base, clause="MSK-8", about=about, mask="rows", no_grad=True, L=33)


def _of_rare_calls(claims: Claims) -> Iterator[KernelCase]:
    """Yield calls that take another way through a kernel, or that programs make late."""
    alignment = claims.alignment or "top_left"
    window = KernelCase(clause="WIN-1", alignment=alignment, L=65)
    for bounds in ((9, 3), (0, 3)):
        yield replace(window, about="one query with a window", window=bounds, L=1)
    about = "a causal call with a window of later keys"
    yield replace(window, about=about, window=(7, 3), causal=True)
    about = "without a bound on one side, more queries than keys"
    for sides in ((None, 2), (2, None)):
        yield replace(window, clause="WIN-2", about=about, window=sides, L=150)
    yield KernelCase(clause="SCL-1", about="a scale of 0", scale=0.0, L=9)
    about = "heads share keys, in longer rows"
    yield KernelCase(clause="GQA-1", about=about, H=4, H_kv=2, L=9, S=700)
    causal = KernelCase(clause="CAU-3", causal=True, alignment=alignment, L=40)
    # One title, so that they stay one after the other, for a mask that is kept for so many queries.
    causal = replace(causal, about="causal: fewer keys than queries, then more")
    yield replace(causal, S=20)
    yield causal
    about = "causal: more than 2048 places"
    yield replace(causal, clause="CAU-2", about=about, B=1, H=1, L=2100, S=2130, d=64)


def _is_claimed(case: KernelCase, claims: Claims) -> bool:
    """Return whether a kernel with these claims takes such a call."""
    shares_heads = claims.grouped_query or claims.multi_query
    refused = (
        case.causal and claims.causal is None,
        case.clause == "LSE-1" and claims.lse is None,
        case.kv_heads != case.H and not shares_heads,
        not _mask_is_claimed(case, claims),
    )
    return not any(refused) and _options_are_claimed(case, claims)


def _mask_is_claimed(case: KernelCase, claims: Claims) -> bool:
    """Return whether a kernel takes the mask of a case."""
    if case.mask == "none":
        return True
    form, axes = MASKS[case.mask]
    differs = set(axes) - set(case.mask_once)
    claimed = all(getattr(claims, DIFFER[axis]) for axis in differs)
    is_joint = {0, 2} <= differs
    refused = (
        form not in claims.masks,
        not claimed,
        is_joint and not claims.joint_masks,
        case.mask_rank not in claims.mask_ranks,
        case.mask in WITH_EMPTY_ROWS and claims.empty_row == "error",
        claims.prefix_masks and case.mask not in OF_PREFIXES,
    )
    if any(refused):
        return False
    return claims.combines_causal or not case.causal


def _options_are_claimed(case: KernelCase, claims: Claims) -> bool:
    """Return whether a kernel takes what a case says about the scores."""
    scores = claims.scores
    given = {
        "scale": case.scale,
        "window": case.window,
        "chunk": case.chunk,
        "softcap": case.softcap,
        "sinks": case.sinks or None,
        "alibi": case.slopes or None,
    }
    for name, value in given.items():
        if value is not None and not scores.takes(name):
            return False
    if case.scale is not None and case.scale <= 0 and scores.scale != "any":
        return False
    return not case.d_v or claims.value_width


def _fitted(case: KernelCase, claims: Claims) -> KernelCase | None:
    """Return a case in sizes that are claimed, or None where that would be another case."""
    sizes = claims.sizes
    width, d_v = sizes.fit_head_dim(case.d), case.d_v
    if d_v and sizes.head_dim_pairs is not None:
        width, d_v = min(sizes.head_dim_pairs)
    heads, kv_heads = _fitted_heads(case, claims)
    queries, keys = (_fitted_length(length, claims) for length in (case.L, case.S))
    if claims.cross_attention is not True:
        queries = keys
    window = case.window
    if window is not None and claims.scores.window is not None:
        window = claims.scores.window.nearest(window)
    case = replace(
        case,
        d=width,
        d_v=d_v,
        H=heads,
        H_kv=kv_heads,
        L=queries,
        S=keys,
        window=window,
        causal=case.causal or claims.always_causal,
        alignment=claims.alignment or "top_left",
        lse=claims.lse is not None,
    )
    refused = sizes.refused(n_heads=heads, head_dim=width, lengths=(queries, keys))
    return None if refused else case


def _fitted_heads(case: KernelCase, claims: Claims) -> tuple[int, int]:
    """Return claimed numbers of query heads and of key heads."""
    heads, kv_heads = case.H, case.H_kv
    if claims.sizes.n_heads is not None:
        heads = smallest_from(claims.sizes.n_heads, heads)
    if claims.multi_query or (kv_heads and heads % kv_heads):
        kv_heads = 1
    return heads, kv_heads


def _fitted_length(length: int, claims: Claims) -> int:
    """Return the nearest claimed length that is at least as long, or else the longest."""
    multiple, most = claims.sizes.length_multiple, claims.sizes.max_length
    fitted = -(-length // multiple) * multiple
    if most is None:
        return fitted
    return min(fitted, most // multiple * multiple)
