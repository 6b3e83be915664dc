"""The CAP clauses: scores that are capped by a hyperbolic tangent."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="CAP-1",
        level="MAY",
        title="The softcap acts where it is declared to",
        statement=(
            "With a cap c, scaled scores s become c tanh(s / c) before the mask, and before or"
            " after a float mask is added, as `Scores.softcap` says. Masked keys stay masked."
        ),
        why=(
            "Gemma 2 and Grok cap their scores. A cap after the mask turns -infinity into -c, so"
            " that masked keys have a weight; one before the scale is another cap."
        ),
        source=(
            "Gemma Team 2024, section 2 (logit soft-capping); flash-attention documentation"
            " (`softcap`)"
        ),
        differs=(
            "flash-attention caps before ALiBi is added, FlashInfer after it. transformers' eager"
            " path caps before the mask; its SDPA function raises for a cap."
        ),
        violation=(
            "`scores = mask_scores(scores); scores = cap * tanh(scores / cap)`: -infinity becomes"
            " -cap."
        ),
        fix="Scale, cap, add the bias, mask: in this order.",
    ),
    Clause(
        id="CAP-2",
        level="MAY",
        title="The gradient of a capped score has the factor 1 - tanh^2",
        statement=(
            "Gradients with a cap are within the bound of the exact ones, those of the scores times"
            " 1 - tanh^2(s / c)."
        ),
        why="A backward pass without the factor trains another model than the forward pass runs.",
        source="the derivative of tanh",
        differs="flash-attention raises for a cap beside dropout.",
        violation="The backward pass computes scores again, without the cap's derivative.",
        fix="Multiply the gradient of the capped scores by 1 - (capped / c)^2.",
    ),
    Clause(
        id="CAP-3",
        level="MAY",
        title="A cap of 0 caps nothing, and no cap overflows",
        statement=(
            "A cap of 0 gives the result of a call without one, or is refused. With a cap a"
            " thousand times the scores, and with scores a hundred times the cap, results are"
            " finite, and within the bound."
        ),
        why=(
            "0 is the default of most kernels, and means none. A tangent of exp(x) / exp(x) is NaN"
            " for large scores."
        ),
        source=(
            "flash-attention documentation (`softcap=0.0` deactivates it); known bug:"
            " NVIDIA/Megatron-LM#6590"
        ),
        differs=(
            "0 switches it off in flash-attention, vLLM and SGLang, None in transformers and JAX's"
            " kernels. vLLM's tangent is (e^x - e^-x) / (e^x + e^-x), which is NaN beyond 88."
        ),
        violation="`tanh(s / cap)` for a cap of 0: NaN wherever a score is 0.",
        fix="Leave the cap out where it is 0 or None, and use a tangent that does not overflow.",
    ),
)
