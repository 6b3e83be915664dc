"""The GRD clauses: gradients of outputs with respect to inputs, weights and masks."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="GRD-1",
        level="MUST",
        title="Gradients match the oracle's",
        statement=(
            "Gradients with respect to query, key, value and every weight match the oracle's"
            " float64 gradients within the gradient bound, also with dropout. In bfloat16 and"
            " float16, where that bound is loose, their root mean square error SHOULD be at most"
            " twice that of the plain formula in the same dtype."
        ),
        why=(
            "Training follows the gradient, not the output. With a slightly incorrect gradient the"
            " loss still falls, more slowly or to a worse model, and nobody sees why."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017 by differentiation; Dao et al. 2022,"
            " appendix B, writes out the backward pass"
        ),
        differs=(
            "Fused kernels recompute the weights from the row's logsumexp and compute the row sum"
            " of P dP as dC.o, which rounds differently; pytorch/pytorch#103462 reports incorrect"
            " gradients of a memory-efficient kernel."
        ),
        violation=(
            "`grad_q = grad_scores @ k` in a hand-written backward pass, without 1/sqrt(d_k): the"
            " query's gradient is too large by a factor of sqrt(d_k)."
        ),
        fix=(
            "Let autograd differentiate the forward pass, or compare each line of the hand-written"
            " backward pass with it; look for a `detach`, a missing scale, and a sum over a"
            " broadcast axis."
        ),
        general=True,
    ),
    Clause(
        id="GRD-2",
        level="MUST",
        title="float64 gradcheck passes",
        statement="`torch.autograd.gradcheck` passes in float64.",
        why=(
            "Users run this check on their own layers. Attention that fails it makes the check"
            " useless for every module built on top."
        ),
        source="torch.autograd.gradcheck documentation",
        differs="",
        violation=(
            "`scores.softmax(-1).detach() @ v`: the output is correct, but finite differences show"
            " a dependence on query and key whose gradient is reported as zero."
        ),
        fix=(
            "Remove `detach()`, `.data` and `no_grad` from the path of the gradient, compute in the"
            " dtype of the inputs throughout, and compare a hand-written backward pass with"
            " autograd's."
        ),
    ),
    Clause(
        id="GRD-3",
        level="MUST",
        title="Masked keys and values get no gradient",
        statement=(
            "The gradient with respect to a masked key or value is exactly 0. (For rows without any"
            " allowed key, see MSK-8.)"
        ),
        why=(
            "A gradient there trains the embedding of the padding, and makes the optimiser's step"
            " depend on how far a batch was padded."
        ),
        source="Follows from MSK-1: the output is constant in a masked key and value",
        differs=(
            "torch.nn.MultiheadAttention 2.13 gives exact zeros with and without `need_weights`."
            " With an empty row in the batch, `need_weights=True` gives NaN instead (MSK-9)."
        ),
        violation=(
            "`(scores - 30 * ~mask).softmax(-1)`: a masked key keeps a weight of about 1e-13, too"
            " small to show in a float32 output, but its value gets a gradient."
        ),
        fix=(
            "Mask with -infinity before the softmax, and apply the mask in a hand-written backward"
            " pass too."
        ),
    ),
    Clause(
        id="GRD-4",
        level="MUST",
        title="Gradients are finite where outputs are",
        statement=(
            "Gradients are finite wherever the outputs are, including in batches with empty rows;"
            " in float16 and bfloat16, only where the gradients themselves are in the range of the"
            " dtype."
        ),
        why=(
            "One NaN makes the norm used for gradient clipping NaN, and then every parameter, while"
            " the loss printed for that step is still a number."
        ),
        source="Known bug: NaN gradients behind a finite output (pytorch/pytorch#41508)",
        differs=(
            "`nan_to_num` after the softmax repairs the output but, where -infinity was added to"
            " the scores, not the gradient, since 0 * NaN is NaN in the backward pass. Slicing the"
            " row away leaves NaN in the gradient of the values, whether -infinity was added or"
            " filled in."
        ),
        violation=(
            "`(scores + mask).softmax(-1).nan_to_num()` with an additive mask and an empty row: the"
            " output is finite, but the gradient of the query is NaN."
        ),
        fix=(
            "Where -infinity is added to the scores, `nan_to_num` or `torch.where` after the"
            " softmax leaves NaN in the gradient: unmask rows without an allowed key before the"
            " softmax, and set their weights to zero after it."
        ),
    ),
    Clause(
        id="GRD-5",
        level="MUST",
        title="requires_grad does not change other gradients",
        statement=(
            "`requires_grad` on any subset of the inputs, also with the weights frozen, gives the"
            " same gradients as on all of them; `no_grad`, `inference_mode` and frozen weights give"
            " the same output."
        ),
        why=(
            "Fine-tuning freezes parts of a model and trains the rest. The parts that are trained"
            " must get the same gradient, whatever is frozen."
        ),
        source=(
            "torch.autograd documentation: `requires_grad` selects what is recorded, not what is"
            " computed; known bug: pytorch/pytorch#106630"
        ),
        differs=(
            "F.scaled_dot_product_attention chooses kernels by what requires a gradient; on CUDA,"
            " the backward pass crashed when only the mask required one (pytorch/pytorch#188302)."
            " In torch.nn.MultiheadAttention, the gradient mode selects the fast path (PTH-2)."
        ),
        violation=(
            "`if not ctx.needs_input_grad[0]: return None, None, None` in a custom backward pass:"
            " when the query is frozen, key and value get no gradient."
        ),
        fix=(
            "Do not select code by `requires_grad` or the gradient mode; in a custom backward pass,"
            " test `ctx.needs_input_grad[i]` for each input separately."
        ),
    ),
    Clause(
        id="GRD-6",
        level="MUST",
        title="Only additive masks get gradients",
        statement=(
            "The mask gets no gradient unless it is an additive mask that requires one; then it"
            " gets the correct one."
        ),
        why=(
            "Relative position biases are learned through the additive mask. Without its gradient"
            " they keep their initial values, and the loss does not show it."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017 with a bias added to the scores;"
            " torch.autograd documentation: only floating-point and complex tensors have gradients"
        ),
        differs=(
            "F.scaled_dot_product_attention and torch.nn.MultiheadAttention 2.13 differentiate"
            " float masks on the CPU. xFormers' memory-efficient attention at first had no gradient"
            " for its bias (facebookresearch/xformers#636)."
        ),
        violation=(
            "`scores + mask.detach()`: a learned bias enters the output, but is never trained."
        ),
        fix=(
            "Add the additive mask without `detach()`, and sum its gradient over the axes along"
            " which it was broadcast."
        ),
    ),
    Clause(
        id="GRD-7",
        level="MUST",
        title="The key bias has zero gradient",
        statement=(
            "The gradient of the key bias is 0 within the bound, since the softmax cancels it, and"
            " the gradients of a row's scores sum to 0."
        ),
        why=(
            "A nonzero gradient of the key bias reveals a backward pass that has lost the"
            " normalisation of the softmax, so that the gradients of queries and keys are incorrect"
            " as well."
        ),
        source=(
            "Follows from equation 1 of Vaswani et al. 2017: the softmax is invariant to a shift of"
            " its argument (SMX-3)"
        ),
        differs=(
            "Rounding leaves a small remainder: about 3e-6, against 13 for the query bias, in one"
            " float32 measurement of torch.nn.MultiheadAttention."
        ),
        violation=(
            "`grad_scores = weights * grad_weights`, without subtracting the row's `(weights *"
            " grad_weights).sum(-1)`: the rows do not sum to 0, and b_k gets a gradient."
        ),
        fix=(
            "In a hand-written backward pass, `grad_scores = weights * (grad_weights - (weights *"
            " grad_weights).sum(-1, keepdim=True))`; otherwise remove what does not cancel in the"
            " softmax, such as a clamp of the scores or an epsilon."
        ),
    ),
    Clause(
        id="GRD-8",
        level="MUST",
        title="Half-precision errors of gradients do not add up to a defect",
        statement=(
            "In bfloat16 and float16, the errors of the gradients of inputs and weights, projected"
            " on what a small defect of the backward pass would do to them (a gradient that is too"
            " large, another scale, a lost key or row sum, a masked key that leaks), are no larger"
            " than independent roundings explain."
        ),
        why=(
            "Models are trained in half precision, where the bound on each element of a gradient is"
            " larger than the gradient itself. A backward pass that is 5% off passes there, and"
            " trains something else."
        ),
        source=(
            "Higham and Mary 2019 (independent roundings grow as sqrt(n) u); Hoeffding 1963: a"
            " false alarm has a probability of at most 3e-14 under that model; Dao et al. 2022,"
            " appendix B, for the backward pass"
        ),
        differs=(
            "FlashAttention's own tests allow twice the largest error of plain code. A kernel that"
            " recomputes the weights from the row's logsumexp, or takes the row sum as dC.o, rounds"
            " in other places; all of these are explained."
        ),
        violation=(
            "`grad_q = (grad_scores @ k) * 0.18` for 1/sqrt(32) = 0.17678 in a bfloat16 kernel:"
            " each element is within the bound, but together they are as if the gradient of the"
            " query were 1.8% too large."
        ),
        fix=(
            "The message says of which defect there is how much. Compare that line of the backward"
            " pass with the formula: the scale, the row sum of P dP, the mask, the last tile of"
            " keys."
        ),
        general=True,
    ),
    Clause(
        id="GRD-9",
        level="MAY",
        title="Gradients can be differentiated",
        statement=(
            "Where second derivatives are claimed, gradients that are computed with"
            " `create_graph=True` are the same gradients, and can be differentiated: in float64,"
            " `torch.autograd.gradgradcheck` passes for inputs and weights."
        ),
        why=(
            "Gradient penalties, meta-learning and Hessian-vector products differentiate gradients."
            " A term that is missing there leaves the loss plausible, and trains something else."
        ),
        source=(
            "torch.autograd.gradgradcheck documentation; torch.autograd.grad documentation,"
            " `create_graph`"
        ),
        differs=(
            "The fused CPU kernel of F.scaled_dot_product_attention has no second derivative in"
            " torch 2.13, so neither has torch.nn.MultiheadAttention without weights; both raise."
            " The math backend has one."
        ),
        violation=(
            "`ctx.weights = weights` in the forward pass of a torch.autograd.Function, read again"
            " in its backward pass: gradients are correct, but their derivatives take the weights"
            " for constants."
        ),
        fix=(
            "Save only inputs and outputs with `ctx.save_for_backward`, and recompute everything"
            " else, such as the weights, in the backward pass with differentiable operations; or do"
            " not claim `second_gradients`."
        ),
    ),
    Clause(
        id="GRD-10",
        level="MUST",
        title="A second backward pass gives the same",
        statement=(
            "With `retain_graph=True`, a second backward pass through the output of one call gives"
            " the gradients of the first, or raises."
        ),
        why=(
            "Two losses of one forward pass, and checks of gradients, go back twice. A backward"
            " pass that writes into what it saved, or into its own upstream gradient, gives other"
            " numbers the second time, without an error."
        ),
        source=(
            "torch.Tensor.backward documentation, `retain_graph`; known bugs"
            " (axolotl-ai-cloud/axolotl#3892, linkedin/Liger-Kernel#272)"
        ),
        differs="Kernels that reuse the memory of the logits or of the upstream gradient differ.",
        violation=(
            "`weights.mul_(upstream)` on a saved tensor in the backward pass of a"
            " torch.autograd.Function: the second pass finds a product where the weights were."
        ),
        fix=(
            "Change nothing in place that `ctx.saved_tensors` gives, nor the upstream gradient; or"
            " raise in a second pass, as `torch.autograd.function.once_differentiable` does for"
            " second derivatives."
        ),
    ),
)
