"""The CMP clauses: attention in the transformations and modes of torch, such as compilation and
autocast.
"""

from mha.spec.clauses.clause import Clause

CLAUSES: tuple[Clause, ...] = (
    Clause(
        id="CMP-1",
        level="MAY",
        kind="conduct",
        title="Compiled and eager results agree",
        statement=(
            "`torch.compile(module, fullgraph=True)` agrees with eager execution within the bound,"
            " with and without gradients, and so do its gradients."
        ),
        why=(
            "Compiling is the usual way to make a model faster. If it changes the result, the model"
            " in production is not the one that was debugged. A part that silently runs uncompiled,"
            " which only `fullgraph` reveals, is not made faster."
        ),
        source="torch.compile documentation; known bugs: pytorch/pytorch#179578, #148545",
        differs=(
            "Inductor recognises explicit softmax(q k^T) v patterns and replaces them with a fused"
            " kernel, which rounds differently, so bits may differ where the bound holds."
        ),
        violation=(
            "A custom operator that adds the mask to the scores in place but is registered with"
            " `mutates_args=()`: the compiled program loses the change, and with it the mask."
        ),
        fix=(
            "Do not branch on `torch.compiler.is_compiling()`, on values, or by `.item()`, and"
            ' declare what a custom operator changes (`mutates_args`); or do not claim "compile".'
        ),
    ),
    Clause(
        id="CMP-2",
        level="MAY",
        kind="conduct",
        title="Exported programs agree at any size",
        statement=(
            "`torch.export` captures the module with dynamic B, L and S, and the exported program"
            " agrees with it."
        ),
        why=(
            "An exported program serves batches and lengths that its example did not have. If it is"
            " specialised to the example, it rejects them, and each size needs its own export."
        ),
        source="torch.export documentation (dynamic shapes)",
        differs=(
            "torch.nn.MultiheadAttention 2.13 can be exported this way with `need_weights=False`; a"
            " program specialised to the example's sizes is the usual failure."
        ),
        violation=(
            "`B, L = int(query.shape[0]), int(query.shape[1])`: `int` turns the sizes of the"
            " example into constants, and `torch.export` refuses to treat them as dynamic."
        ),
        fix=(
            "Take sizes from `tensor.shape` at each call, without `int()` or branches on them; or"
            ' do not claim "export".'
        ),
    ),
    Clause(
        id="CMP-3",
        level="MAY",
        kind="conduct",
        title="torch.func transforms agree",
        statement=(
            "`torch.func.functional_call`, `vmap` over a batch of weights and `grad` agree with the"
            " plain module."
        ),
        why=(
            "Ensembles, per-sample gradients and meta-learning run the module through these"
            " transforms. Code that bypasses its parameters gives the result of other weights, or a"
            " gradient of zero."
        ),
        source="torch.func documentation",
        differs=(
            "torch.nn.MultiheadAttention 2.13 works under `vmap`, but warns that its fused kernels"
            " have no batching rule and fall back to a slow loop."
        ),
        violation=(
            "A packed weight built once in `__init__` by `torch.cat`: `functional_call` replaces"
            " the three parameters, but the result is still that of the old ones."
        ),
        fix=(
            "Read the parameters at each call, from attributes of the module; or do not claim"
            ' "func".'
        ),
    ),
    Clause(
        id="CMP-4",
        level="MAY",
        kind="conduct",
        title="Autocast stays within the bound",
        statement=(
            "Under autocast, the result is within the low-precision bound and can be"
            " differentiated: where it is finite, so is every gradient."
        ),
        why=(
            "Mixed-precision training runs a whole model under autocast. Code that assumes float32"
            " between its own lines overflows there, or raises on mixed dtypes."
        ),
        source="torch.amp documentation",
        differs=(
            "torch.nn.MultiheadAttention 2.13 returns bfloat16 for float32 inputs under bfloat16"
            " autocast on the CPU."
        ),
        violation=(
            "`scores.masked_fill(~mask, -1e9)` under float16 autocast: the scores are float16"
            " there, and the fill raises."
        ),
        fix=(
            'Fill with `float("-inf")`, and cast to a common dtype where dtypes meet; or do not'
            ' claim "autocast".'
        ),
    ),
    Clause(
        id="CMP-5",
        level="MAY",
        kind="conduct",
        title="Activation checkpointing changes nothing",
        statement=(
            "Under `torch.utils.checkpoint.checkpoint`, with `use_reentrant=True` and with False,"
            " outputs and gradients are those of a plain call: within the bound, and with dropout"
            " those of the same draws from the same seed."
        ),
        why=(
            "Large models are trained with checkpointing, which computes the forward pass again in"
            " the backward pass. If the second one differs, the gradients are those of another"
            " function."
        ),
        source="torch.utils.checkpoint documentation",
        differs=(
            "torch restores its own random numbers for the second forward pass, not those of a"
            " `torch.Generator` that the module keeps."
        ),
        violation=(
            "A mask of dropout that is drawn in advance, and drawn anew after each call: the"
            " backward pass uses another one than the output."
        ),
        fix=(
            "Draw with torch's own generator in the call itself, and keep nothing between calls"
            ' that changes the result; or do not claim "checkpoint".'
        ),
    ),
    Clause(
        id="CMP-6",
        level="MAY",
        kind="conduct",
        title="Deterministic algorithms are deterministic",
        statement=(
            "Under `torch.use_deterministic_algorithms(True)`, two calls raise, or give outputs and"
            " gradients of equal bits, and right ones."
        ),
        why=(
            "Runs are repeated in this mode to find a defect, or to show that a result can be"
            " reproduced. Code that does not heed it lets both fail without a word."
        ),
        source="torch.use_deterministic_algorithms and torch.utils.deterministic documentation",
        differs=(
            "The mode fills new memory with NaN, so that code which reads what it has not written"
            " gives NaN there, and usually zeros elsewhere."
        ),
        violation=(
            "A context that is added to `torch.empty(...) * 0`: NaN in this mode, and right"
            " elsewhere as long as the memory has finite numbers."
        ),
        fix=(
            "Sum in an order that does not depend on time, threads or addresses, start sums with"
            ' `torch.zeros`, and raise where a kernel cannot; or do not claim "deterministic".'
        ),
    ),
)
