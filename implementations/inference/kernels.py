"""How a plain function of query, key and value is understood: it is adapted as a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from time import process_time
from typing import Any

from torch import nn

from mha.implementations.adapters.kernel_axes import (
    AS_MANY,
    MERGED_LAYOUTS,
    ONE_QUERY_EACH,
    TOKENS,
    function_of,
)
from mha.implementations.adapters.of_width import OfWidth
from mha.implementations.adapters.packing import packing_names
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.discovery.raised import main_one
from mha.implementations.inference.alibi import slopes_of_all_calls
from mha.implementations.inference.candidate import (
    Candidate,
    may_need_a_gpu,
    on_a_gpu,
    without_gradients,
)
from mha.implementations.inference.declared import DeclaredKernel
from mha.implementations.inference.describe import rows_of_kernel, shape_words
from mha.implementations.inference.dropout import require_repeatable
from mha.implementations.inference.infer import Inference
from mha.implementations.inference.kernel_forms import (
    PACKED_INPUTS,
    code_of_constructor,
    require_inputs,
    required_names,
    takes_tokens,
)
from mha.implementations.inference.mask_search import given_a_mask
from mha.implementations.inference.nearest_projections import outputs_of, with_formula
from mha.implementations.inference.probes import FEW_DTYPES, GENERAL, Probe
from mha.implementations.inference.projections import Asked, Unclear, Undeclarable
from mha.implementations.inference.questions import require_scale
from mha.implementations.inference.refusals import calls_raise
from mha.implementations.inference.search import with_claims
from mha.implementations.inference.sizes import PATIENCE, TILES, in_few_sizes
from mha.implementations.inference.unused import unused_options
from mha.implementations.process.pristine import as_found, pristine
from mha.implementations.process.torch_state import threads
from mha.spec import Scores, Window
from mha.spec.scores import NO_BOUND

# The layouts of heads that are tried, then those whose context has other axes.
OF_HEADS = ("b h l d", "b l h d", "l b h d")
OTHER_CONTEXTS = (*OF_HEADS, "b l (h d)", "l b (h d)")
CONTEXTS = [f"{x} -> {y}" for x in OF_HEADS for y in OTHER_CONTEXTS if x != y]
LAYOUTS = (*OF_HEADS, *MERGED_LAYOUTS, *CONTEXTS, *AS_MANY)
SUPPLIED = {name: name for name in ("w_q", "w_k", "w_v", "w_o")}

# Trial runs in few sizes, and L = S of one that shows how long they will take.
FEW = GENERAL.probes(cross_attention=False, multiple=TILES[-1])
SIDE = 64


@pristine()
@threads(1)
def infer_kernel(
    kernel: Callable[..., Any], label: str = "", made: Callable[[], nn.Module] | None = None
) -> Inference:
    """Infer the layout and the masks of a function, or a module, of query, key and value.

    label: its name in reports; by default its own.
    made: what makes a module, if it is a class; see `kernel_maker`.

    Raises ImplementationError where no layout gives the formula of attention.
    """
    label = label or str(getattr(kernel, "__name__", "kernel"))
    if made:
        with as_found():
            kernel = made()
    require_inputs(kernel, label)
    candidates = _candidates(kernel, label, made)
    try:
        candidate = _first_found(candidates)
    except ImplementationError:
        if not all(each.problem and may_need_a_gpu(each) for each in candidates):
            raise
        candidate = _first_found([*map(on_a_gpu, candidates)])
    declared = candidate.declared
    code = code_of_constructor(declared)
    require_scale(candidate, code)
    return Inference(
        implementation=declared.implementation(),
        rows=tuple(rows_of_kernel(candidate)),
        declaration=declared.code(code),
        kind="class" if made or isinstance(kernel, OfWidth) else "function",
        not_covered=tuple(unused_options(candidate)),
    )


def _candidates(
    kernel: Callable[..., Any], label: str, made: Callable[..., nn.Module] | None
) -> list[Candidate]:
    """Return a candidate for each layout of query, key and value, those with one key head last."""
    unread = Candidate(
        DeclaredKernel(kernel, label, parameters=dict(SUPPLIED), made=made, claims={"causal": None})
    )
    if takes_tokens(kernel):
        names = packing_names(inspect.signature(function_of(kernel)).parameters)
        if "offsets" in names:  # for queries and keys alike
            unread = unread.claiming(cross_attention=False)
        return _of_layouts(unread, (TOKENS, f"{TOKENS} -> t (h d)"))
    packed = PACKED_INPUTS.get(required_names(kernel), "")
    if packed == "3":
        unread = unread.claiming(cross_attention=False)
    if packed:
        return _of_layouts(unread, _packed_layouts(packed))
    of_heads = _of_layouts(unread, OF_HEADS)
    others = _of_layouts(unread, LAYOUTS[len(OF_HEADS) :])
    # Contiguous heads come before the merged layouts, for which most heads are copied too.
    contiguous = [each.declaring(contiguous=True) for each in of_heads]
    one_key_head = [each.claiming(multi_query=True) for each in of_heads]
    return [*of_heads, *contiguous, *others, *one_key_head]


def _of_layouts(unread: Candidate, layouts: Sequence[str]) -> list[Candidate]:
    """Return a candidate for each of several layouts."""
    return [unread.declaring(layout=layout) for layout in layouts]


def _packed_layouts(packed: str) -> list[str]:
    """Return the layouts of stacked inputs, the usual one first.

    packed: the axis along which they are stacked, which is never the last.
    """
    layouts = []
    for place in (2, 1, 0, 3):
        for layout in ("b l h d", "b h l d", "l b h d"):
            axes = layout.split()
            axes.insert(place, packed)
            layouts.append(" ".join(axes))
    return layouts


def _first_found(candidates: Sequence[Candidate]) -> Candidate:
    """Return the first candidate whose layout gives the formula, in few dtypes or sizes if need be.

    Raises ImplementationError, with what to declare, for what is left open.
    """
    label = candidates[0].label
    try:
        return _found(candidates)
    except Undeclarable as error:
        raise ImplementationError(f"{label} cannot be judged as it is: {error}") from None
    except Asked as question:
        raise ImplementationError(f"{label} needs a declaration: {question}") from None
    except Unclear as unclear:
        raise ImplementationError(
            f"{label} needs a declaration: {unclear}. Declare it below the function, and judge"
            f" that: implementation = from_kernel({label}, layout=..., mask=...)"
        ) from None


def _found(candidates: Sequence[Candidate]) -> Candidate:
    """Return what `_first_found` does; raises Unclear for what is left open."""
    problem, layout = "", ""
    for tried in _tries(candidates):
        # In another layout than one that is left open, a check of an axis is one of another axis.
        candidate = _explained(tried, layout)
        if candidate is None:
            continue
        try:
            return with_claims(candidate)
        except (Undeclarable, Asked):
            raise
        except Unclear as unclear:
            problem, layout = problem or str(unclear), candidate.declared.layout
    raise Unclear(problem or _without_formula(candidates))


def _explained(candidates: Iterable[Candidate], layout: str) -> Candidate | None:
    """Return the first candidate that a formula explains, and that hides no fault.

    layout: the only one to try, if given.
    """
    for candidate in candidates:
        if layout in ("", candidate.declared.layout):
            explained = with_formula(candidate)
            if explained and not _hides_a_fault(explained):
                return explained
    return None


def _tries(candidates: Sequence[Candidate]) -> Iterator[Iterable[Candidate]]:
    """Yield what to try in turn; raises Undeclarable for outputs that are random.

    Few sizes come before other layouts: a kernel that is wrong for some sizes may be right for
    other axes.
    """
    usual = list(filter(_is_usual, candidates))
    others = [each for each in candidates if not _is_usual(each)]
    for each in _with_and_without_windows(usual):
        yield each
        yield chain.from_iterable(given_a_mask(each))
    require_repeatable(usual)
    yield _in_few_dtypes(_raising(usual))
    yield _while_patient(usual)
    yield others
    decoding = [each for each in others if each.declared.layout in ONE_QUERY_EACH]
    yield chain.from_iterable(given_a_mask(decoding))
    yield map(without_gradients, candidates)
    yield _while_patient([each for each in others if each.declared.layout not in CONTEXTS])


def _with_and_without_windows(candidates: Sequence[Candidate]) -> list[Sequence[Candidate]]:
    """Return the candidates, and the same with a window in each call that is beyond any length.

    The latter come first where the default is a window, which short inputs may not show, and are
    left out for a kernel that has no window, or none by default.
    """
    if not candidates:
        return []
    names, signature = {*candidates[0].names_of("window")}, candidates[0].signature
    if not names.intersection(signature.others + signature.acting):
        return [candidates]
    in_windows = list[Candidate]()
    for form in ("count", "left_right"):
        # The alignment is that of no key yet; a reading of the window has its own.
        scores = Scores(window=Window(form, unbounded=NO_BOUND), alignment="top_left")
        in_windows += [each.claiming(scores=scores) for each in candidates]
    if names.intersection(signature.acting):
        return [in_windows, candidates]
    return [candidates, in_windows]


def _raising(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates of which a call has raised."""
    return [each for each in candidates if each.problem]


def _is_usual(candidate: Candidate) -> bool:
    """Return whether each head has a key of its own, and the context lies as the query does."""
    if "multi_query" in candidate.claims:
        return False
    return candidate.declared.layout not in (*MERGED_LAYOUTS, *CONTEXTS, *AS_MANY)


def _in_few_dtypes(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates for kernels that raise for float64, in each other dtype."""
    return [each.trying(dtype=dtype) for dtype in FEW_DTYPES for each in candidates]


def _while_patient(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield candidates in few sizes, which are long, as long as trial runs do not take too long."""
    called = _first_that_returns([*candidates, *_in_few_dtypes(candidates)])
    begun = process_time()
    if called and called.device == "cpu":  # a GPU takes no longer for more
        called.call(_short_inputs())
    most = max(probe.batch * probe.keys**2 for probe in FEW)
    spent = (process_time() - begun) * most / SIDE**2
    for each in _in_few_sizes_and_dtypes(candidates):
        if spent > PATIENCE:
            return
        yield each
        spent = process_time() - begun


def _short_inputs() -> Any:
    return Probe(1, SIDE, SIDE, cross_attention=False).inputs


def _first_that_returns(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the first candidate whose call returns anything; what is compiled, it compiles."""
    for each in candidates:
        if each.call(_short_inputs()):
            return each
    return None


def _in_few_sizes_and_dtypes(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield candidates in few sizes, then those that have raised in other dtypes."""
    few = list(map(in_few_sizes, candidates))
    yield from few
    raising = []
    for each, in_all in zip(few, candidates, strict=True):
        if each.problem or in_all.problem:
            raising.append(each)
    yield from _in_few_dtypes(raising)


def _hides_a_fault(candidate: Candidate) -> bool:
    """Return whether a kernel is given contiguous heads, or single ones, but takes others too."""
    declared, others = candidate.declared, list[Candidate]()
    assert isinstance(declared, DeclaredKernel)
    if declared.contiguous:
        others = [candidate.declaring(contiguous=False)]
    if declared.layout in AS_MANY:
        others = _of_layouts(candidate, (*OF_HEADS, *MERGED_LAYOUTS))
    inputs = candidate.probes[0].inputs
    return any(each.call_plainly(inputs) for each in others)


def _without_formula(candidates: Sequence[Candidate]) -> str:
    """Return what a kernel raises, or that it computes no known formula.

    Raises ImplementationError for an error of its code, or what that needs and is missing here.
    """
    candidate, packed = candidates[0], required_names(candidates[0].declared.constructor)
    names = " and ".join(packed) if packed in PACKED_INPUTS else "query, key and value"
    tried = [candidate, *_in_few_dtypes([candidate])]
    if any(map(outputs_of, tried)):
        always_sloped = filter(None, map(slopes_of_all_calls, candidates[: len(OF_HEADS)]))
        problem = next(always_sloped, "its output matches no formula of attention")
    else:
        problem = _raised(candidates, tried, names)
    return (
        f"called with {names} of shape {shape_words(candidate.declared.layout)}, {problem}; a"
        " function that makes a module needs parameters d_model and n_heads"
    )


def _raised(candidates: Sequence[Candidate], tried: Sequence[Candidate], names: str) -> str:
    """Return what a kernel raises; raises ImplementationError as `_without_formula` does."""
    label = candidates[0].label
    tries = [[each.calls.raised] for each in (*tried, *candidates) if each.calls.raised]
    raised = main_one(tries)
    if raised.needs:
        raise ImplementationError(f"{label} {raised.needs} (each call raises {raised})")
    problem = raised.text
    if raised.place:
        problem = calls_raise(raised, tries[: len(tried)])
    if raised.is_of_code:
        raise ImplementationError(f"{label} cannot be judged: called with {names}, {problem}")
    return problem
