"""The HED clauses: many heads are many single heads, concatenated."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="HED-1",
        level="MUST",
        title="Heads equal a loop over heads",
        statement=(
            "The result equals the per-head loop: head i uses rows i*d_k to (i+1)*d_k - 1 of W_q, W_k and W_v, and "
            "the heads are concatenated in order before W_o."
        ),
        why=(
            "Checkpoints are laid out by this convention. A module that groups the columns otherwise learns well from "
            "scratch, but a pretrained model loaded into it gives noise."
        ),
        source=(
            "Vaswani et al. 2017, section 3.2.2; defect class: a reshape without the transpose (reczoo/FuxiCTR#30, "
            "jsbaan/transformer-from-scratch#6)"
        ),
        differs=(
            "torch.nn.MultiheadAttention stacks W_q, W_k and W_v in one `in_proj_weight`. Others interleave the three "
            "per head, or store weights as (in, out) or (in, heads, width) as Keras and Flax do; an adapter must say "
            "which."
        ),
        violation=(
            "`q.view(B, H, L, d_k)` of a (B, L, D) tensor, without a transpose: each head gets a stretch of the "
            "sequence, not a slice of the width."
        ),
    ),
    Clause(
        id="HED-2",
        level="MUST",
        title="Heads are independent",
        statement="Changing head i's slice of W_q changes the weights of head i only.",
        why=(
            "Heads are pruned, analysed and spread over devices one by one. If one reaches another's weights, removing "
            "it changes the rest."
        ),
        source="Follows from Vaswani et al. 2017, section 3.2.2: head i depends on its own projections",
        differs="Weights averaged over the heads, torch.nn.MultiheadAttention's default, hide which head changed.",
        violation=(
            "`scores.softmax(1)` on (B, H, L, S): the heads share each key out among themselves, so a change in one "
            "changes all."
        ),
    ),
    Clause(
        id="HED-3",
        level="MUST",
        title="The order of heads is arbitrary",
        statement=(
            "Permuting the heads (rows of W_q, W_k, W_v and their biases, columns of W_o, and a per-head mask, "
            "together) changes nothing."
        ),
        why=(
            "Pruning and tensor parallelism renumber heads. A head whose number matters cannot be moved to another "
            "place or rank."
        ),
        source="Follows from Vaswani et al. 2017, section 3.2.2: Concat(...) W_o is a sum over the heads",
        differs="",
        violation=(
            "`k[:, h // 2 * 2]` in a kernel that takes heads in pairs: head 1 reads the keys of head 0, and in another "
            "order the pairs are others."
        ),
    ),
    Clause(
        id="HED-4",
        level="MUST",
        title="One head is plain attention",
        statement="n_heads = 1 equals single-head attention followed by W_o.",
        why=(
            "One head is the formula of the textbook, the case that is checked by hand. A special path for it is code "
            "that the usual configurations never run."
        ),
        source="Vaswani et al. 2017, equation 1 and section 3.2.2 with h = 1",
        differs="vit-pytorch leaves W_o out when there is one head as wide as the model.",
        violation="`if n_heads == 1: return context`: W_o is left out, and never gets a gradient.",
    ),
    Clause(
        id="HED-5",
        level="MUST",
        title="The output is a sum over heads",
        statement=(
            "Zeroing head i's columns of W_o removes exactly head i's contribution: the output is the sum of the "
            "heads' contributions plus b_o."
        ),
        why=(
            "Pruning a head is zeroing its columns of W_o, and tensor parallelism adds up the outputs of groups of "
            "heads. Both are right only if this sum is."
        ),
        source=(
            "Follows from Vaswani et al. 2017, section 3.2.2: a block row vector times W_o is the sum of the blocks' "
            "products"
        ),
        differs="",
        violation=(
            "`sum(F.linear(context[h], w_o[h], b_o) for h in range(H))`, with `w_o[h]` the columns of head h: b_o is "
            "added H times."
        ),
    ),
)
