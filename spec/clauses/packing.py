"""The PAK clauses: sequences that are packed one after another."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="PAK-1",
        level="MAY",
        title="A packed sequence is attended to alone",
        statement=(
            "The rows of a sequence in a row of tokens equal attention on this sequence alone,"
            " whatever is before and after it, with every other option: causal mask, window,"
            " chunks and ALiBi count places from the sequence's own lengths. Tokens in gaps between"
            " sequences, where `Packed(gaps=True)` is claimed, reach nothing, NaN neither."
        ),
        why=(
            "Training packs documents of different lengths, and a server packs requests. What sees"
            " its neighbour learns from another document, or tells one user of another."
        ),
        source="flash-attention (`flash_attn_varlen_func`), FlashInfer, Transformer Engine (thd)",
        differs=(
            "flash-attention and FlashInfer align each sequence bottom-right by its own lengths."
            " Only Transformer Engine has offsets with gaps; flash-attention 3 has numbers of used"
            " tokens beside them."
        ),
        violation="`keys[start : start + max_seqlen]` for each: shorter sequences see the next.",
        fix="Take keys from the offset of a sequence to that of the next, and mask the last tile.",
    ),
    Clause(
        id="PAK-2",
        level="MAY",
        title="A sequence of length 0 harms none",
        statement=(
            "A sequence without queries, without keys, or without both, changes no row of others,"
            " nor their gradients. Queries without keys have empty rows, see MSK-8."
        ),
        why="A batch that is split over ranks has such sequences, and a request that begins.",
        source="known bugs: Dao-AILab/flash-attention#1947, and its pull request 2568",
        differs="flash-attention gives zeros; flash-attention 4 refused them for some widths.",
        violation="`exp(s - lse)` backwards, with an lse of -inf: NaN, which sums spread.",
        fix="Skip sequences without queries or keys; write zeros for queries without keys.",
    ),
    Clause(
        id="PAK-3",
        level="MAY",
        title="Tokens after the last offset reach nothing",
        statement=(
            "Tokens after the last offset are refused, or have rows of zeros, or any rows, as"
            " `Packed.tail` says. They change no other row and no gradient, even if they are NaN."
        ),
        why=(
            "Buffers are padded to a size that a compiled graph was made for. What is there is"
            " never set, and gradients of it are added up in the weights."
        ),
        source="known bug: Dao-AILab/flash-attention, pull request 2324",
        differs="flash-attention leaves rows after the last offset as `torch.empty` makes them.",
        violation="`dq = torch.empty_like(q)`: rows after the last offset keep what was there.",
        fix="Write zeros after the last offset, or document that rows and gradients are undefined.",
    ),
    Clause(
        id="PAK-4",
        level="SHOULD",
        kind="refusals",
        accepts="offsets that do not begin at 0, fall, or end after the tokens",
        title="Offsets that are none are refused",
        statement=(
            "Offsets that do not begin at 0, that fall, or that end after the last token, raise."
        ),
        why=(
            "Lengths given for offsets, or offsets of another row, read memory of others; on a GPU"
            " that is an error in a later call, or none."
        ),
        source="flash-attention checks shape and dtype of offsets, not their values",
        differs="No kernel of flash-attention, FlashInfer or vLLM looks at the values.",
        violation="`cu_seqlens=torch.tensor([3, 5])`: lengths, where offsets are expected.",
        fix="Check them on the CPU where they are made, or in a kernel of one block.",
    ),
)
