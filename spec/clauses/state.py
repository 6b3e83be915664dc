"""The STA clauses: a call has no side effects."""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="STA-1",
        level="MUST",
        kind="conduct",
        title="Arguments are not modified",
        statement="Inputs, masks and weights are not modified.",
        why=(
            "Callers reuse their tensors: the residual connection adds the query, and the next"
            " layer takes the same mask. A change in place corrupts them far from its cause."
        ),
        source="Known bugs: in-place scaling of the query, `masked_fill_` on the caller's mask",
        differs="",
        violation=(
            "`query.mul_(d_k**-0.5)`: the residual connection then adds a query that is too small."
        ),
        fix=(
            "Replace operations in place on arguments, `mul_`, `+=`, `masked_fill_`, by those that"
            " return a new tensor."
        ),
    ),
    Clause(
        id="STA-2",
        level="MUST",
        kind="conduct",
        title="Results do not share memory",
        statement=(
            "The output shares no memory with an input, and a later call does not change an earlier"
            " result."
        ),
        why=(
            "Outputs are collected in lists and modified in place. An output that lives in a buffer"
            " of the module, or in an input, changes after the fact."
        ),
        source=(
            "Known bugs: output buffers kept between calls, identity shortcuts that return the"
            " input"
        ),
        differs="",
        violation=(
            "`torch.matmul(context, w_o.T, out=self.buffer)`, returned as the output: under"
            " `no_grad`, the outputs of two calls are one tensor."
        ),
        fix=(
            "Return a new tensor: neither a view of an input nor a buffer that the next call fills"
            " again."
        ),
    ),
    Clause(
        id="STA-3",
        level="MUST",
        kind="conduct",
        title="Calls repeat bit for bit",
        statement=(
            "Two calls with the same inputs give the same bits on the CPU. A call affects neither"
            " the next call nor the backward pass of an earlier one, whatever its shapes, masks or"
            " failures were, and whether or not its tensors have changed since."
        ),
        why=(
            "A result that depends on earlier calls cannot be reproduced in isolation, and neither"
            " can its bugs. On a server, one request would change the next."
        ),
        source=(
            "PyTorch documentation on reproducibility; known bug: causal masks or results cached by"
            " shape, id or data pointer"
        ),
        differs=(
            "Some GPU kernels sum with atomic additions and do not repeat bit for bit unless"
            " deterministic algorithms are requested, so the clause is limited to the CPU."
        ),
        violation=(
            "`if self.mask is None: self.mask = mask`, kept from the first call: every later call"
            " uses the mask of the first."
        ),
        fix=(
            "Keep nothing from a call on the module; what is cached must be keyed by everything"
            " that it depends on."
        ),
    ),
    Clause(
        id="STA-4",
        level="MUST",
        kind="conduct",
        title="Saving preserves the module",
        statement=(
            "`state_dict` round-trips into a fresh module, strictly, with equal outputs, also"
            " through `torch.save` and `torch.load`, and when the module is part of a larger one."
            " Loaded weights take effect from the next call on. (For copies, see STA-8.)"
        ),
        why=(
            "Checkpoints and servers rebuild the module from its state. Whatever is missing from"
            " the state is initialised again on loading."
        ),
        source="torch.nn.Module documentation, `state_dict` and `load_state_dict`",
        differs=(
            "torch.nn.MultiheadAttention has one `in_proj_weight` where the three widths are equal"
            " and three separate weights otherwise, so the names in its state depend on `kdim` and"
            " `vdim`."
        ),
        violation=(
            "`self.w_o = torch.randn(d_model, d_model)`, a plain tensor: it is not in `state_dict`,"
            " so a fresh module has a different one."
        ),
        fix=(
            "Register every tensor as a parameter or a buffer, compute nothing from the weights"
            " ahead of the call, and keep no tensor of a call on the module."
        ),
    ),
    Clause(
        id="STA-5",
        level="MUST",
        kind="conduct",
        title="Global state is left alone",
        statement=(
            "A call does not change global state: default dtype, gradient mode, random state"
            " (except for dropout in training), thread count, deterministic flags, the handling of"
            " subnormal numbers, and the warnings filter. Nor does construction, which may draw"
            " initial weights, but not reset the random state of torch or Python."
        ),
        why=(
            "A module is a small part of a program. If it resets the random state, data order and"
            " dropout repeat everywhere; if it sets the default dtype, tensors created elsewhere"
            " change."
        ),
        source=(
            "Known bugs: `torch.manual_seed`, `torch.set_default_dtype` or `warnings.simplefilter`"
            " inside a module"
        ),
        differs="",
        violation=(
            "`torch.manual_seed(0)` in `forward`, for repeatable dropout: after each call, all"
            " random numbers of the program start over."
        ),
        fix=(
            "Pass a generator or a dtype to the operation that needs it, or restore the state with"
            " a context manager."
        ),
    ),
    Clause(
        id="STA-6",
        level="MUST",
        kind="conduct",
        title="Training mode affects only dropout",
        statement="`train()` and `eval()` affect nothing except dropout.",
        why=(
            "Users call `eval()` to switch dropout off and nothing else. Any other effect makes"
            " evaluation differ from training, with no option that explains it."
        ),
        source=(
            "torch.nn.Module documentation, `train` and `eval`; known bug: pytorch/pytorch#86120"
        ),
        differs=(
            "In torch.nn.MultiheadAttention 2.13, `eval()` also enables the inference fast path,"
            " which gives NaN where training mode gives b_o (PTH-2)."
        ),
        violation=(
            "`if not self.training: scores = scores.clamp(-50, 50)`, for safety in production:"
            " large scores give different weights in eval mode."
        ),
        fix="Read `self.training` for dropout and for nothing else.",
    ),
    Clause(
        id="STA-7",
        level="SHOULD",
        kind="conduct",
        title="Threads may share one module",
        statement=(
            "Calls from several threads on one module give the same results as those calls made one"
            " by one."
        ),
        why=(
            "Servers share one module between threads. Scratch space on the module mixes up the"
            " requests of different users, rarely and without a trace."
        ),
        source="Known bug: scratch tensors kept as attributes of the module",
        differs="",
        violation=(
            "`self.scores = q @ k.transpose(-1, -2)`, read again a line later: another thread may"
            " have replaced it in between."
        ),
        fix="Keep intermediate results in local variables instead of attributes of the module.",
    ),
    Clause(
        id="STA-8",
        level="SHOULD",
        kind="conduct",
        title="Copies and pickles preserve the module",
        statement=(
            "`copy.deepcopy` and `pickle` give a module with equal outputs and weights of its own,"
            " also after a call whose gradients are recorded."
        ),
        why=(
            "Averaged weights, layers that are repeated by copying, and worker processes copy a"
            " module, often after it has been called. A tensor that a call left on it makes the"
            " copy fail."
        ),
        source=(
            "Python documentation of `copy` and `pickle`; torch.Tensor: only leaf tensors support"
            " the deepcopy protocol"
        ),
        differs=(
            "torch.nn.MultiheadAttention can be copied and pickled at any time. The Annotated"
            " Transformer and ESPnet keep the weights of the last call on the module (`self.attn`),"
            " so that a copy raises once gradients were recorded."
        ),
        violation=(
            "`self.attn = scores.softmax(-1)` in `forward`: after a call in training,"
            " `copy.deepcopy` raises, since `self.attn` is not a leaf."
        ),
        fix="Keep no tensor of a call on the module, or keep what `.detach()` returns.",
    ),
    Clause(
        id="STA-9",
        level="SHOULD",
        kind="conduct",
        title="Layers are called as modules",
        statement=(
            "Each linear layer of the module whose weight counts is called, so that hooks on it"
            " take effect."
        ),
        why=(
            "LoRA, quantisation, pruning and profilers put a hook on a projection, or another layer"
            " in its place. Where the module reads `layer.weight` itself, they are installed, and"
            " do nothing."
        ),
        source=(
            "torch.nn.Module.register_forward_hook documentation; known bugs"
            " (pytorch/pytorch#78109)"
        ),
        differs=(
            "torch.nn.MultiheadAttention reads `out_proj.weight`, and never calls `out_proj`; PEFT"
            " has a layer of its own for it."
        ),
        violation=(
            "`F.linear(x, self.w_o.weight)` in `forward`: an adapter on `w_o` is trained, and"
            " changes nothing."
        ),
        fix="Call the layer: `self.w_o(context)`.",
    ),
    Clause(
        id="STA-10",
        level="SHOULD",
        kind="conduct",
        title="Every parameter gets a gradient",
        statement=(
            "After a backward pass in training, every parameter that requires a gradient has one."
        ),
        why=(
            "DistributedDataParallel waits for the gradient of every parameter, and raises, or"
            " hangs, where one never comes; weight decay shrinks a parameter that nothing else"
            " moves."
        ),
        source="torch.nn.parallel.DistributedDataParallel documentation, `find_unused_parameters`",
        differs=(
            "torch.nn.MultiheadAttention and the usual textbook code have no unused parameters."
        ),
        violation=(
            "A second projection that is made for cross-attention, `self.kv`, and not used in"
            " self-attention."
        ),
        fix="Do not make the parameter, or let it be a buffer, or `requires_grad_(False)`.",
    ),
)
