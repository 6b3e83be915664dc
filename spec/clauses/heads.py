"""The HED clauses: multi-head attention is several single heads, concatenated."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="HED-1",
        level="MUST",
        title="Multi-head attention equals a loop over heads",
        statement=(
            "The result equals that of a loop over the heads: head i uses rows i*d_k to (i+1)*d_k -"
            " 1 of W_q, W_k and W_v, and the heads are concatenated in order before W_o."
        ),
        why=(
            "Checkpoints are laid out in this way. A module that groups the columns differently"
            " learns well from scratch, but gives noise when a pretrained model is loaded into it."
        ),
        source=(
            "Vaswani et al. 2017, section 3.2.2; known bug: a reshape without the transpose"
            " (reczoo/FuxiCTR#30, jsbaan/transformer-from-scratch#6)"
        ),
        differs=(
            "torch.nn.MultiheadAttention stacks W_q, W_k and W_v in one `in_proj_weight`. Others"
            " interleave the three per head, or store weights as (in, out) or (in, heads, width),"
            " as Keras and Flax do; an adapter must say which."
        ),
        violation=(
            "`q.view(B, H, L, d_k)` of a (B, L, D) tensor, without a transpose: each head gets a"
            " stretch of the sequence instead of a slice of the width."
        ),
        fix=(
            "Split with `x.view(B, N, H, d_k).transpose(1, 2)` and merge with `.transpose(1,"
            " 2).reshape(B, N, D)`; or declare the layout of the weights with an einops pattern in"
            " `parameters`."
        ),
        general=True,
    ),
    Clause(
        id="HED-2",
        level="MUST",
        title="Heads are independent",
        statement="Changing head i's slice of W_q changes only the attention weights of head i.",
        why=(
            "Heads are pruned, analysed and distributed over devices one by one. If one head"
            " affects another's weights, removing it changes the rest."
        ),
        source=(
            "Follows from Vaswani et al. 2017, section 3.2.2: head i depends only on its own"
            " projections"
        ),
        differs=(
            "Weights averaged over the heads, torch.nn.MultiheadAttention's default, hide which"
            " head changed."
        ),
        violation=(
            "`scores.softmax(1)` on (B, H, L, S): the heads compete for each key, so a change in"
            " one changes all."
        ),
        fix=(
            "Take the softmax over the keys of each head, and no maximum, mean or norm across"
            " heads."
        ),
    ),
    Clause(
        id="HED-3",
        level="MUST",
        title="The order of heads does not matter",
        statement=(
            "Permuting the heads (the rows of W_q, W_k, W_v and their biases, the columns of W_o,"
            " and a per-head mask, all together) changes nothing."
        ),
        why=(
            "Pruning and tensor parallelism renumber heads. A head whose index matters cannot be"
            " moved to another position or rank."
        ),
        source=(
            "Follows from Vaswani et al. 2017, section 3.2.2: Concat(...) W_o is a sum over the"
            " heads"
        ),
        differs="",
        violation=(
            "`k[:, h // 2 * 2]` in a kernel that processes heads in pairs: head 1 reads the keys of"
            " head 0, and another order makes other pairs."
        ),
        fix=(
            "Index every tensor by the head itself: look for an index that is rounded, paired or"
            " fixed."
        ),
    ),
    Clause(
        id="HED-4",
        level="MUST",
        title="One head is plain attention",
        statement="With `n_heads = 1`, the result equals single-head attention followed by W_o.",
        why=(
            "One head is the textbook formula, the case that is checked by hand. A special code"
            " path for it is one that the usual configurations never run."
        ),
        source="Vaswani et al. 2017, equation 1 and section 3.2.2 with h = 1",
        differs="vit-pytorch leaves W_o out when there is one head as wide as the model.",
        violation="`if n_heads == 1: return context`: W_o is left out, and never gets a gradient.",
        fix=(
            "Remove the special case for one head; it needs the projections and W_o like any other."
        ),
        general=True,
    ),
    Clause(
        id="HED-5",
        level="MUST",
        title="The output is a sum over heads",
        statement=(
            "Zeroing head i's columns of W_o removes exactly head i's contribution: the output is"
            " the sum of the heads' contributions plus b_o."
        ),
        why=(
            "Pruning a head means zeroing its columns of W_o, and tensor parallelism adds up the"
            " outputs of groups of heads. Both are correct only if the output is this sum."
        ),
        source=(
            "Follows from Vaswani et al. 2017, section 3.2.2: a block row vector times W_o is the"
            " sum of the blocks' products"
        ),
        differs="",
        violation=(
            "`sum(F.linear(context[h], w_o[h], b_o) for h in range(H))`, with `w_o[h]` the columns"
            " of head h: b_o is added H times."
        ),
        fix=(
            "Add b_o once, after the heads are concatenated or summed, and put nothing non-linear"
            " between the heads and W_o."
        ),
    ),
)
