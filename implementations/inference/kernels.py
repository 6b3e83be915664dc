"""How a plain function of query, key and value is understood: it is adapted as a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import process_time
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mha.implementations.adapters.kernel import (
    AS_MANY,
    MERGED_LAYOUTS,
    KernelAxes,
    KernelImplementation,
    from_kernel,
    function_of,
)
from mha.implementations.adapters.outputs import as_output
from mha.implementations.adapters.signature import Signature, call_parameters
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.discovery.raised import main_one
from mha.implementations.inference.candidate import (
    Candidate,
    Kind,
    may_need_a_gpu,
    on_a_gpu,
    without_gradients,
)
from mha.implementations.inference.causal import find_causal
from mha.implementations.inference.causal_flags import with_idle_constructor_flag
from mha.implementations.inference.declaration import declaration_of
from mha.implementations.inference.describe import Row, shared_rows
from mha.implementations.inference.empty_rows import find_empty_row
from mha.implementations.inference.infer import Inference
from mha.implementations.inference.kernel_forms import (
    PACKED_INPUTS,
    code_of,
    require_inputs,
    required_names,
    results_of,
)
from mha.implementations.inference.lse import find_lse
from mha.implementations.inference.mask_search import with_masks
from mha.implementations.inference.nearest_projections import find_formula, outputs_of
from mha.implementations.inference.options import find_options, find_weights
from mha.implementations.inference.probes import FEW_DTYPES, GENERAL, Probe, is_close
from mha.implementations.inference.projections import ParameterMap, Unclear, Undeclarable
from mha.implementations.inference.refusals import calls_raise
from mha.implementations.inference.sizes import (
    PATIENCE,
    TILES,
    claim_more_sizes,
    find_widths,
    in_few_sizes,
)
from mha.implementations.inference.unused import unused_options
from mha.implementations.process.pristine import as_found, pristine
from mha.implementations.process.torch_state import threads
from mha.spec import Claims

# The layouts of heads that are tried, then those whose context has other axes.
OF_HEADS = ("b h l d", "b l h d", "l b h d")
CONTEXTS = [
    f"{x} -> {y}" for x in OF_HEADS for y in (*OF_HEADS, "b l (h d)", "l b (h d)") if x != y
]
LAYOUTS = (*OF_HEADS, *MERGED_LAYOUTS, *CONTEXTS, *AS_MANY)
SUPPLIED: ParameterMap = {f"w_{role}": f"w_{role}" for role in "qkvo"}


# Trial runs in few sizes, and L = S of one that shows how long they will take.
FEW = GENERAL.probes(cross_attention=False, multiple=TILES[-1])
SIDE = 64


@dataclass
class KernelCandidate(Candidate):
    """One way to understand a kernel.

    layout, contiguous: as for `from_kernel`. made: how the kernel is made, if it is a module;
    `constructor` is the module.
    """

    contiguous: bool = False
    made: Callable[..., nn.Module] | None = None

    def options(self) -> dict[str, Any]:
        """Return the arguments for `from_kernel`, except the claims."""
        shape: dict[str, Any] = {"mask_shape": self.mask_shape} if self.mask_shape else {}
        shape |= {"mask_numbers": True} if self.mask_numbers else {}
        shape |= {"masked_number": self.masked_number} if self.masked_number != "-inf" else {}
        shape |= {"causal_by_default": True} if self.masks.causal_by_default else {}
        layout: dict[str, Any] = {"layout": self.layout} if self.layout != LAYOUTS[0] else {}
        layout |= {"contiguous": True} if self.contiguous else {}
        return {"mask": self.mask, **shape, **layout}

    def implementation(self) -> KernelImplementation:  # type: ignore[override]  # of a kernel
        """Return the implementation that this candidate declares."""
        masks = {} if self.mask else {"masks": ()}
        made = from_kernel(
            self.constructor,
            **self.options(),
            claims=Claims(**masks | self.claims),
            name=self.label,
        )
        return replace(made, call=self.as_called(made.call))

    def for_trials(self) -> KernelImplementation:  # type: ignore[override]  # of a kernel
        """Return the implementation: a kernel is not built for a length."""
        return self.implementation()

    @property
    def constructor_parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of what makes the kernel, if it is a module."""
        return inspect.signature(self.made).parameters if self.made else {}

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The parameters that are set to make the kernel, each with its value; by us, those of
        dropout.
        """
        return getattr(self.made, "keywords", {})

    def built_with(self: Kind, name: str, *, value: bool) -> Kind:
        """Return the candidate for a kernel that is made with a parameter set."""
        assert isinstance(self, KernelCandidate)
        assert self.made
        made = partial(self.made, **{name: value})
        return replace(self, constructor=made(), made=made, claims=dict(self.claims))

    def left_behind(self) -> list[str]:
        """Return nothing: a function has no attributes."""
        return []

    def signature_with(self, *, padding: bool) -> Signature:
        """What the parameters mean; `from_kernel` declares no mask of padding beside another one."""
        return KernelAxes.read(self.label, self.layout).with_heads(
            self.constructor, super().signature_with(padding=False)
        )

    @property
    def forward_parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the kernel, with query, key and value where it takes them as fewer
        tensors.
        """
        own = call_parameters(function_of(self.constructor))
        return KernelAxes.read(self.label, self.layout).parameters_of(own)


def _candidates(
    kernel: Callable[..., Any], label: str, made: Callable[..., nn.Module] | None
) -> list[KernelCandidate]:
    """Return a candidate for each layout of query, key and value, those with one key head last."""
    packed = PACKED_INPUTS.get(required_names(kernel), "")
    claims: dict[str, Any] = {"causal": None} | (
        {"cross_attention": False} if packed == "3" else {}
    )
    tried = [(layout, claims) for layout in (_packed_layouts(packed) if packed else LAYOUTS)]
    tried += [] if packed else [(layout, claims | {"multi_query": True}) for layout in OF_HEADS]
    candidates = [
        KernelCandidate(kernel, SUPPLIED, label, layout, claims=dict(given), made=made)
        for layout, given in tried
    ]
    # Contiguous heads come before the merged layouts, for which most heads are copied too.
    of_heads = 0 if packed else len(OF_HEADS)
    contiguous = [
        replace(each, contiguous=True, claims=dict(claims)) for each in candidates[:of_heads]
    ]
    return [*candidates[:of_heads], *contiguous, *candidates[of_heads:]]


def _packed_layouts(packed: str) -> list[str]:
    """Return the layouts of inputs of which some are stacked along any axis but the last, the usual
    one first.
    """
    places = [
        (layout.split(), place)
        for place in (2, 1, 0, 3)
        for layout in ("b l h d", "b h l d", "l b h d")
    ]
    return [" ".join([*axes[:place], packed, *axes[place:]]) for axes, place in places]


def _rows(candidate: KernelCandidate) -> list[Row]:
    """Return what was found about a kernel."""
    packed = required_names(candidate.constructor)
    alone = ", contiguous ones alone" if candidate.contiguous else ""
    inputs = (
        packed
        if packed in PACKED_INPUTS
        else candidate.signature.inputs or list(candidate.forward_parameters)[:3]
    )
    return [
        Row("kernel", "judged on query, key and value themselves", "by its parameters"),
        Row("inputs", f"{', '.join(inputs)}, of shape {_shape(candidate.layout)}{alone}", "tested"),
        *shared_rows(candidate, {}),
    ]


def _shape(layout: str) -> str:
    """Return a layout as the shape of the inputs, and of the context where that has another one."""
    inputs, _, context = layout.replace("(b h)", "b*h").replace("(h d)", "h*d").partition(" -> ")
    shape, other = (f"({', '.join(axes.split())})" for axes in (inputs, context))
    return f"{shape}, the context {other}" if context else shape


def _first_found(candidates: Sequence[KernelCandidate]) -> KernelCandidate:
    """Return the first candidate whose layout gives the formula, in few dtypes or sizes if need be.

    Raises ImplementationError, with what to declare, for what is left open.
    """
    problem, layout = "", ""
    for tried, in_few in _tries(candidates):
        matching = (each for each in tried if layout in ("", each.layout) and find_formula(each))
        candidate = next((each for each in matching if not _hides_a_fault(each)), None)
        if candidate:
            try:
                return _with_claims(
                    replace(candidate, claims=dict(candidate.claims)), in_few=in_few
                )
            except Undeclarable as error:
                raise ImplementationError(
                    f"{candidate.label} cannot be judged as it is: {error}"
                ) from None
            except Unclear as unclear:
                # In another layout, a check of one axis would be one of another.
                problem, layout = problem or str(unclear), candidate.layout
    problem = problem or _without_formula(candidates)
    label = candidates[0].label
    raise ImplementationError(
        f"{label} needs a declaration: {problem}. Declare it below the function, and judge that: "
        f"implementation = from_kernel({label}, layout=..., mask=...)"
    )


def _tries(
    candidates: Sequence[KernelCandidate],
) -> Iterator[tuple[Iterable[KernelCandidate], bool]]:
    """Yield what to try in turn, each with whether it claims few sizes.

    Few sizes come before other layouts: a kernel that is wrong for some sizes may be right for
    other axes.
    """
    usual = [each for each in candidates if _is_usual(each)]
    others = [each for each in candidates if not _is_usual(each)]
    yield usual, False
    yield _in_few_dtypes([each for each in usual if each.problem]), False
    yield _while_patient(usual), True
    yield others, False
    yield map(without_gradients, candidates), False
    yield _while_patient([each for each in others if each.layout not in CONTEXTS]), True


def _in_few_dtypes(candidates: Sequence[KernelCandidate]) -> list[KernelCandidate]:
    """Return the candidates for kernels that raise for float64, in each other dtype."""
    return [replace(each, dtype=dtype, problem="") for dtype in FEW_DTYPES for each in candidates]


def _while_patient(candidates: Sequence[KernelCandidate]) -> Iterator[KernelCandidate]:
    """Yield candidates in few sizes, which are long, for as long as trial runs do not take too
    long.
    """
    short = Probe(1, SIDE, SIDE, cross_attention=False).inputs
    # The first call compiles what is compiled.
    called = next(
        (each for each in (*candidates, *_in_few_dtypes(candidates)) if each.call(short)), None
    )
    begun = process_time()
    if called and called.device == "cpu":  # a GPU takes no longer for more
        called.call(short)
    spent = (process_time() - begun) * max(probe.batch * probe.keys**2 for probe in FEW) / SIDE**2
    for each in _in_few_sizes_and_dtypes(candidates):
        if spent > PATIENCE:
            return
        yield each
        spent = process_time() - begun


def _in_few_sizes_and_dtypes(candidates: Iterable[KernelCandidate]) -> Iterator[KernelCandidate]:
    """Yield candidates in few sizes, then those that have raised there in other dtypes."""
    few = [*map(in_few_sizes, candidates)]
    yield from few
    yield from _in_few_dtypes([each for each in few if each.problem])


def _is_usual(candidate: KernelCandidate) -> bool:
    """Return whether each head has a key of its own, and the context lies as the query does."""
    return (
        candidate.layout not in (*MERGED_LAYOUTS, *CONTEXTS, *AS_MANY)
        and "multi_query" not in candidate.claims
    )


def _ignores_heads(candidate: Candidate) -> bool:
    """Return whether a kernel of one key head takes more of them, too, and then computes something
    else.
    """
    one_for_each = {
        name: claim for name, claim in candidate.claims.items() if name != "multi_query"
    }
    inputs = candidate.probes[0].inputs
    return (
        one_for_each != candidate.claims
        and replace(candidate, claims=one_for_each).call_plainly(inputs) is not None
    )


def _without_formula(candidates: Sequence[KernelCandidate]) -> str:
    """Return what a kernel raises, or that it computes no known formula.

    Raises ImplementationError for an error of its code, or what that needs and is missing here.
    """
    candidate, packed = candidates[0], required_names(candidates[0].constructor)
    tried = [candidate, *_in_few_dtypes([candidate])]
    called = any(outputs_of(each) for each in tried)
    names = " and ".join(packed) if packed in PACKED_INPUTS else "query, key and value"
    if called:
        problem = "its output matches no formula of attention"
    else:
        tries = [[each.raised] for each in (*tried, *candidates) if each.raised]
        raised = main_one(tries)
        if raised.needs:
            raise ImplementationError(
                f"{candidate.label} {raised.needs} (each call raises {raised})"
            )
        problem = calls_raise(raised, tries[: len(tried)]) if raised.place else raised.text
        if raised.is_of_code:
            raise ImplementationError(
                f"{candidate.label} cannot be judged: called with {names}, {problem}"
            )
    return (
        f"called with {names} of shape {_shape(candidate.layout)}, {problem}; a function that makes"
        " a module needs parameters d_model and n_heads"
    )


def _with_claims(candidate: KernelCandidate, *, in_few: bool) -> KernelCandidate:
    """Return a candidate that gives the formula with all its claims; raises Unclear for what is
    left open.

    in_few: whether it claims few sizes.
    """
    if _ignores_heads(candidate):
        raise Unclear(
            "it uses one key head and ignores the others; if all heads share it, claim"
            " multi_query=True"
        )
    if in_few:
        claim_more_sizes(candidate, explained=True)
    if _raises_unless_contiguous(candidate):
        candidate = replace(candidate, contiguous=True)
    candidate = with_masks(candidate, rebuilt=False)
    find_causal(candidate)
    candidate = with_idle_constructor_flag(candidate)
    find_empty_row(candidate)
    find_weights(candidate)
    find_options(candidate, {})
    if "devices" in candidate.claims and _is_forward_only(candidate):
        candidate.claims["gradients"], candidate.detached = False, True
    if in_few:
        explained = dict(candidate.claims)
        claim_more_sizes(candidate, explained=False)
        candidate.shown = (
            "" if candidate.claims == explained else "for some of the sizes that it takes"
        )
        if "3" in candidate.layout.split():  # other keys cannot be given
            candidate.other_keys = ""
    else:
        find_widths(candidate)
    if candidate.explained and "multi_query" not in candidate.claims:
        _find_key_heads(candidate)
        _find_value_width(candidate)
    if candidate.explained:
        find_lse(candidate)
    return candidate


def _hides_a_fault(candidate: KernelCandidate) -> bool:
    """Return whether a kernel is given contiguous heads, or single ones, alone, though it does not
    raise for others.
    """
    others = [replace(candidate, contiguous=False)] if candidate.contiguous else []
    if candidate.layout in AS_MANY:
        others = [replace(candidate, layout=layout) for layout in (*OF_HEADS, *MERGED_LAYOUTS)]
    return any(each.call_plainly(candidate.probes[0].inputs) is not None for each in others)


def _raises_unless_contiguous(candidate: KernelCandidate) -> bool:
    """Return whether a kernel raises for heads that are not contiguous, and for no others."""
    inputs, copied = candidate.probes[0].inputs, replace(candidate, contiguous=True)
    strided = {id(x): x.mT.contiguous().mT for x in inputs}  # one tensor stays one tensor
    given = tuple(strided[id(x)] for x in inputs)
    return candidate.call_plainly(given) is None and copied.call_plainly(given) is not None


def _is_forward_only(candidate: KernelCandidate) -> bool:
    """Return whether what a kernel of a GPU returns has no gradient, as one that is not for
    training.
    """
    results = results_of(candidate, candidate.probes[0].inputs)
    returned = [x for each in results for x in as_output(each) if isinstance(x, Tensor)]
    return bool(returned) and not any(x.requires_grad for x in returned)


def _find_key_heads(candidate: Candidate) -> None:
    """Claim fewer key heads if a kernel with four heads and two key heads computes the formula."""
    claims, changes = (
        candidate.claims | {"grouped_query": True},
        {
            "d_model": 48,
            "n_heads": 4,
            "n_kv_heads": 2,
        },
    )
    formula = replace(candidate.formula, n_heads=changes["n_heads"])
    tried = replace(candidate, claims=claims, changes=candidate.changes | changes, formula=formula)
    generator, given = torch.Generator().manual_seed(5), candidate.probes[0].inputs
    drawn = {
        id(x): torch.randn(*x.shape[:2], changes["d_model"], generator=generator, dtype=x.dtype)
        for x in given
    }
    query, key, value = (drawn[id(x)] for x in given)  # one tensor stays one
    result = tried.call_plainly((query, key, value))
    if result and is_close(result.output, tried.formula((query, key, value), tried.weights, None)):
        candidate.claims = claims


def _find_value_width(candidate: Candidate) -> None:
    """Claim values of their own width, if a kernel that takes heads of any width computes the
    formula with them.
    """
    if candidate.sizes.head_dims or candidate.sizes.head_dim_multiple > 1:
        return
    claims, changes = (
        candidate.claims | {"value_width": True},
        {"d_value": candidate.config.head_dim + 1},
    )
    tried = replace(candidate, claims=claims, changes=candidate.changes | changes)
    inputs = candidate.probes[0].inputs
    result = tried.call_plainly(inputs)
    if result and is_close(result.output, tried.formula(inputs, tried.weights, None)):
        candidate.claims = claims


@pristine()
@threads(1)
def infer_kernel(
    kernel: Callable[..., Any], label: str = "", made: Callable[[], nn.Module] | None = None
) -> Inference:
    """Infer the layout and the masks of a function, or a module, of query, key and value.

    label: its name in reports; by default its own. made: what makes a module, if it is a class; see
    `kernel_maker`.

    Raises ImplementationError where no layout gives the formula of attention.
    """
    label = label or str(getattr(kernel, "__name__", "kernel"))
    with as_found():
        kernel = made() if made else kernel
    require_inputs(kernel, label)
    candidates = _candidates(kernel, label, made)
    try:
        candidate = _first_found(candidates)
    except ImplementationError:
        if not all(each.problem and may_need_a_gpu(each) for each in candidates):
            raise
        candidate = _first_found([*map(on_a_gpu, candidates)])
    code = code_of(candidate.made, label) if candidate.made else label
    declaration = declaration_of(code, candidate.options(), candidate.claims, "from_kernel")
    kind: Literal["class", "function"] = "class" if made else "function"
    options = tuple(unused_options(candidate, {}))
    return Inference(
        candidate.implementation(), tuple(_rows(candidate)), declaration, kind, options
    )
