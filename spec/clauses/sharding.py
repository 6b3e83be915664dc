"""The DST clauses: attention sharded over processes."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="DST-1",
        level="MUST",
        title="Sharded attention equals unsharded",
        statement=(
            "Sharded over ranks, by heads or by sequence, the gathered output is the single-process"
            " one within the bound, and so is each copy of it where every rank has one. Lengths"
            " that twice the number of ranks divides, and heads that the ranks divide, are not"
            " refused."
        ),
        why=(
            "Models too large for one device are trained sharded, and checked on one device. A"
            " difference between the two does not show on any single rank."
        ),
        source=(
            "Shoeybi et al. 2019 (heads over ranks); Liu et al. 2023, Ring Attention (sequence over"
            " ranks)"
        ),
        differs=(
            "PyTorch's own test of context parallelism has no mask, no odd length and no bias,"
            " takes `out.sum()` as the loss, and allows errors that grow with the number of ranks:"
            " 18 of 34 faulty implementations pass it (docs/sharding.md)."
        ),
        violation=(
            "A ring passes keys to the next rank and keeps its values: shapes fit, and each rank"
            " returns a plausible context."
        ),
        fix=(
            "Let keys and values travel together, and merge the parts by the maximum and the sum"
            " over all ranks."
        ),
        general=True,
    ),
    Clause(
        id="DST-2",
        level="MUST",
        title="Sharded gradients equal unsharded ones",
        statement=(
            "With a random upstream gradient, the gradients of inputs, lying as these do, of float"
            " masks, added up over the ranks that have the same one, and of weights, whole on every"
            " rank, are the single-process ones within the bound."
        ),
        why=(
            "Training goes on with incorrect gradients: the loss falls more slowly, or each rank"
            " drifts to weights of its own."
        ),
        source=(
            "Liu et al. 2023, section 3; known bugs: huggingface/diffusers#14265,"
            " NVIDIA/Megatron-LM#1464"
        ),
        differs=(
            "Tests commonly differentiate `output.sum()`. Its upstream gradient of ones hides"
            " errors in the backward pass of the softmax, and parts that are exchanged between"
            " ranks."
        ),
        violation=(
            "The backward pass of a ring uses the keys and values of its last step throughout: the"
            " output is exact, and the gradients are not."
        ),
        fix=(
            "Send the gradients of keys and values around the ring with them, back to the rank that"
            " they belong to, and sum the gradients of replicated weights over the ranks, once."
        ),
        general=True,
    ),
    Clause(
        id="DST-3",
        level="MUST",
        title="Uneven shards are right or refused",
        statement=(
            "Lengths and numbers of heads that the ranks do not divide give the right output and"
            " gradients, or are refused on every rank. A rank may have no position at all."
        ),
        why="Tokens at the end of a sequence, or whole heads, are silently lost.",
        source=(
            "Known bugs: NVIDIA/TransformerEngine#1930 (length 7 is attended to as 6),"
            " zhuzilin/EasyContext#47"
        ),
        differs=(
            "DTensor cuts as `torch.chunk` does, into unequal chunks, and leaves the last ranks"
            " without one. Most context-parallel code wants multiples of twice the number of ranks,"
            " and some of it does not say so."
        ),
        violation=(
            "`local = length // world_size` positions for each rank: of an odd length, the last"
            " token is lost."
        ),
        fix=(
            "Exchange the local lengths, or raise ValueError on every rank before anything is sent."
        ),
    ),
    Clause(
        id="DST-4",
        level="MUST",
        title="Causality goes by global positions",
        statement=(
            "A causal call compares positions in the whole sequence, whichever rank has them, also"
            " where the order is balanced (zigzag or striped), in output and gradients."
        ),
        why="Tokens see their future, or not their past, depending on the rank that they are on.",
        source=(
            "Brandon et al. 2023, Striped Attention; known bug: pytorch/pytorch#141429 (a balanced"
            " order without a causal flag)"
        ),
        differs=(
            "A fused causal kernel numbers the rows that it is given. Over shards it is right only"
            " on the diagonal of a contiguous ring."
        ),
        violation=(
            "`is_causal=True` for each pair of local queries and keys: every rank starts at"
            " position 0."
        ),
        fix=(
            "Build the causal mask from the global positions of both shards, such as those of"
            " `mha.spec.positions`."
        ),
    ),
    Clause(
        id="DST-5",
        level="MUST",
        title="Masks that cross shards are right",
        statement=(
            "Boolean and float masks and padding give the right output and gradients, wherever the"
            " shards are cut and whatever their order, with a causal flag and without. Rows without"
            " a key follow the declared policy."
        ),
        why="Batches are padded, and padding seldom ends where a shard does.",
        source="Known bug: NVIDIA/TransformerEngine#1930 (packed sequences)",
        differs=(
            "PyTorch's context parallelism takes no mask in its scaled-dot-product path; a mask is"
            " to be sharded by the caller as the queries are."
        ),
        violation=(
            "The columns of a mask are cut into chunks while keys lie in zigzag order: other keys"
            " are masked."
        ),
        fix="Index the columns of the mask by the global positions of the keys that a step reads.",
    ),
    Clause(
        id="DST-6",
        level="MUST",
        title="A rank without allowed keys adds nothing",
        statement=(
            "If no key of a rank is allowed to a query, that rank adds exactly nothing to it: no"
            " NaN, and no share of the sum, in output and gradients."
        ),
        why=(
            "In causal attention this is every later rank; one NaN from it spoils the training run."
        ),
        source=(
            "Milakov and Gimelshein 2018 (the merge); -infinity minus -infinity is NaN in IEEE 754;"
            " known bug: NVIDIA/Megatron-LM#1764"
        ),
        differs=(
            "PyTorch merges with `sigmoid(block_lse - lse)`, which is NaN if both are -infinity; it"
            " skips the steps where that could be."
        ),
        violation=(
            "The largest score starts at 0 for a part without keys, and its sum at 1: the empty"
            " part counts as one key with the score 0."
        ),
        fix=(
            "Give an empty part the log-sum-exp -infinity, and replace that before it is subtracted"
            " from itself."
        ),
    ),
    Clause(
        id="DST-7",
        level="MUST",
        title="Fewer key/value heads than ranks are right or refused",
        statement=(
            "Grouped heads are right if the ranks divide the key/value heads. With fewer key/value"
            " heads than ranks, or a number that the ranks do not divide, they are right or refused"
            " on every rank."
        ),
        why=(
            "A query head gets the keys of another group: shapes fit, and a pretrained model gives"
            " noise."
        ),
        source=(
            "Known bug: huggingface/transformers#48307 (not refused, but raises in the middle of a"
            " call)"
        ),
        differs=(
            "Tensor parallelism replicates key/value heads over ranks (vLLM), or refuses. Ulysses"
            " repeats them before its all-to-all."
        ),
        violation=(
            "`k.repeat(1, world_size, 1, 1)` before the all-to-all: heads are tiled as 0, 1, 0, 1."
        ),
        fix=(
            "Repeat each head in succession (`repeat_interleave`), or give each rank the head of"
            " its own group."
        ),
    ),
    Clause(
        id="DST-8",
        level="MUST",
        title="What is replicated counts once",
        statement=(
            "A replicated bias enters the output once, not once for each rank, and its gradient is"
            " that of a single process."
        ),
        why=(
            "The result depends on how many devices there are, and so does every checkpoint trained"
            " with it."
        ),
        source=(
            "Shoeybi et al. 2019, section 3 (the bias of a row-parallel layer is added after the"
            " sum)"
        ),
        differs=(
            "`RowParallelLinear` of Megatron-LM adds its bias after the reduction; a plain"
            " `nn.Linear` on each rank adds it before."
        ),
        violation=(
            "Each rank adds b_o to its partial output before the sum over ranks: with 4 ranks, the"
            " result is 3 b_o too large."
        ),
        fix="Add b_o after the sum, or on one rank only.",
    ),
    Clause(
        id="DST-9",
        level="MUST",
        title="Neither one rank nor their numbers matter",
        statement=(
            "On a mesh of one rank, where claimed, the result is the unsharded one within the"
            " bound. A mesh of some ranks of a larger group, so that ranks have other numbers,"
            " gives the same result within the bound."
        ),
        why=(
            "Ranks are placed by a scheduler, and code that runs on one device is what gets"
            " debugged."
        ),
        source=(
            "torch.distributed.device_mesh.DeviceMesh documentation: a mesh may hold any of the"
            " global ranks"
        ),
        differs=(
            "`dist.get_rank()` is the global rank, `mesh.get_local_rank()` the one that shards"
            " go by."
        ),
        violation="Positions computed from `dist.get_rank()`, in a mesh of the ranks 2 and 3.",
        fix="Take rank, size and group from the mesh, and translate to global ranks only to send.",
    ),
    Clause(
        id="DST-10",
        level="MUST",
        title="Every rank ends",
        statement=(
            "Every rank returns, whatever is masked and however short its part is. An invalid call"
            " raises on every rank, and the next call is right."
        ),
        why=(
            "One rank that waits for another holds all devices of a job until a timeout, and says"
            " nothing."
        ),
        source="Definition of a collective operation: all ranks of a group take part in it",
        differs=(
            "Gloo and NCCL wait for minutes by default; a mismatch of collectives may also deliver"
            " other data."
        ),
        violation=(
            "`if not mask.any(): return zeros`, before the exchange: the other ranks wait for this"
            " one."
        ),
        fix=(
            "Let no branch that depends on local data decide whether to communicate, and validate"
            " what all ranks see before the first message."
        ),
        kind="conduct",
    ),
    Clause(
        id="DST-11",
        level="SHOULD",
        title="Dropout does not depend on the number of ranks",
        statement=(
            "With one seed on every rank, the same numbers are dropped on any claimed number of"
            " ranks."
        ),
        why=(
            "A run cannot be repeated on other hardware, and shards that share a pattern are"
            " dropped alike."
        ),
        source="DTensor's random-number trackers (torch.distributed.tensor._random)",
        differs=(
            "Without a tracker, each rank draws for its own shard: with one seed, all shards have"
            " one pattern."
        ),
        violation="`F.dropout` of a local shard, seeded alike on every rank.",
        fix=(
            "Draw for the whole tensor and keep the local part, or offset a counter-based generator"
            " by the position."
        ),
        kind="conduct",
    ),
)
