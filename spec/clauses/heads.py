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
        source=(
            "Vaswani et al. 2017, section 3.2.2; defect class: a reshape without the transpose (reczoo/FuxiCTR#30, "
            "jsbaan/transformer-from-scratch#6)"
        ),
        differs=(
            "torch.nn.MultiheadAttention stacks W_q, W_k and W_v in one `in_proj_weight`. Others interleave the three "
            "per head, or store weights as (in, out) or (in, heads, width) as Keras and Flax do; an adapter must say "
            "which."
        ),
    ),
    Clause(
        id="HED-2",
        level="MUST",
        title="Heads are independent",
        statement="Changing head i's slice of W_q changes the weights of head i only.",
        source="Follows from Vaswani et al. 2017, section 3.2.2: head i depends on its own projections",
        differs="Weights averaged over the heads, torch.nn.MultiheadAttention's default, hide which head changed.",
    ),
    Clause(
        id="HED-3",
        level="MUST",
        title="The order of heads is arbitrary",
        statement=(
            "Permuting the heads (rows of W_q, W_k, W_v and their biases, columns of W_o, and a per-head mask, "
            "together) changes nothing."
        ),
        source="Follows from Vaswani et al. 2017, section 3.2.2: Concat(...) W_o is a sum over the heads",
        differs="",
    ),
    Clause(
        id="HED-4",
        level="MUST",
        title="One head is plain attention",
        statement="n_heads = 1 equals single-head attention followed by W_o.",
        source="Vaswani et al. 2017, equation 1 and section 3.2.2 with h = 1",
        differs="vit-pytorch leaves W_o out when there is one head as wide as the model.",
    ),
    Clause(
        id="HED-5",
        level="MUST",
        title="The output is a sum over heads",
        statement=(
            "Zeroing head i's columns of W_o removes exactly head i's contribution: the output is the sum of the "
            "heads' contributions plus b_o."
        ),
        source=(
            "Follows from Vaswani et al. 2017, section 3.2.2: a block row vector times W_o is the sum of the blocks' "
            "products"
        ),
        differs="",
    ),
)
