"""The STA clauses: a call leaves nothing behind."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="STA-1",
        level="MUST",
        title="Arguments are not modified",
        statement="Inputs, masks and weights are not modified.",
        source="Defect class: in-place scaling of the query, `masked_fill_` on the caller's mask",
        differs="",
    ),
    Clause(
        id="STA-2",
        level="MUST",
        title="Results do not share memory",
        statement="The output shares no memory with an input, and a later call does not change an earlier result.",
        source="Defect class: output buffers kept between calls, identity shortcuts that return the input",
        differs="",
    ),
    Clause(
        id="STA-3",
        level="MUST",
        title="Calls repeat bit for bit",
        statement=(
            "Two calls with the same inputs give the same bits on the CPU. A call has no effect on the next, whatever "
            "its shapes, masks or failures were."
        ),
        source=(
            "PyTorch documentation on reproducibility; defect class: causal masks or results cached by shape, id or "
            "data pointer"
        ),
        differs=(
            "Some GPU kernels sum with atomic additions and do not repeat to the bit unless deterministic algorithms "
            "are requested, which is why the clause says CPU."
        ),
    ),
    Clause(
        id="STA-4",
        level="MUST",
        title="Saving and copying preserve the module",
        statement=(
            "`state_dict` round-trips into a fresh module, strictly, with equal outputs; so do `copy.deepcopy` and "
            "`torch.save` with `torch.load`."
        ),
        source="torch.nn.Module documentation, `state_dict` and `load_state_dict`",
        differs=(
            "torch.nn.MultiheadAttention has one `in_proj_weight` where the three widths are equal and three separate "
            "weights otherwise, so the names in its state depend on `kdim` and `vdim`."
        ),
    ),
    Clause(
        id="STA-5",
        level="MUST",
        title="Global state is left alone",
        statement=(
            "Global state is left alone: default dtype, gradient mode, random state (outside dropout), thread count, "
            "deterministic flags and the warnings filter."
        ),
        source=(
            "Defect class: `torch.manual_seed`, `torch.set_default_dtype` or `warnings.simplefilter` inside a module"
        ),
        differs="",
    ),
    Clause(
        id="STA-6",
        level="MUST",
        title="Training mode matters only to dropout",
        statement="`train()` and `eval()` matter only to dropout.",
        source="torch.nn.Module documentation, `train` and `eval`; defect class: pytorch/pytorch#86120",
        differs=(
            "In torch.nn.MultiheadAttention 2.13 `eval()` also admits the inference fast path, which gives NaN where "
            "training mode gives b_o (PTH-2)."
        ),
    ),
    Clause(
        id="STA-7",
        level="SHOULD",
        title="Threads may share one module",
        statement="Calls from several threads on one module give the results of the same calls made one by one.",
        source="Defect class: scratch tensors kept as attributes of the module",
        differs="",
    ),
)
