"""Make docs/raw-classes.md: attention classes of packages, given to `mha check` as they are.

It needs the packages of `PACKAGES`; torchvision, torchao and others that no attention needs are
stood in for, so that the packages can be imported without them. `python docs/raw_classes.py NAME
...` prints the rows of these classes alone; `--infer` judges none of them.
"""

import inspect
import os
import sys
import types
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path

from mha.conformance import check
from mha.implementations import ImplementationError, Resolved, resolve

HERE = Path(__file__).parent
STOOD_IN = ("torchvision", "torchao", "kagglehub", "datasets", "numba", "blobfile")
# By the distribution: the classes, and the function in raw_classes_by_hand.py for one that is
# refused.
PACKAGES = {
    "espnet": {"espnet.nets.pytorch_backend.transformer.attention:MultiHeadedAttention": ""},
    "open_clip_torch": {"open_clip.transformer:Attention": ""},
    "vit-pytorch": {
        "vit_pytorch.vit:Attention": "vit",
        "vit_pytorch.cross_vit:Attention": "cross_vit",
        "vit_pytorch.simple_vit:Attention": "",
    },
    "diffusers": {"diffusers.models.attention_processor:Attention": ""},
    "torchtune": {"torchtune.modules.attention:MultiHeadAttention": ""},
    "openai-whisper": {"whisper.model:MultiHeadAttention": "whisper"},
    "torch_geometric": {"torch_geometric.nn.aggr.utils:MultiheadAttentionBlock": "pyg"},
    "transformers": {
        "transformers.models.bert.modeling_bert:BertSelfAttention": "",
        "transformers.models.bert.modeling_bert:BertAttention": "bert",
        "transformers.models.gpt2.modeling_gpt2:GPT2Attention": "",
        "transformers.models.llama.modeling_llama:LlamaAttention": "",
        "transformers.models.vit.modeling_vit:ViTAttention": "",
        "transformers.models.whisper.modeling_whisper:WhisperAttention": "",
        "transformers.models.t5.modeling_t5:T5Attention": "",
        "transformers.models.clip.modeling_clip:CLIPAttention": "",
    },
    "timm": {"timm.layers.attention:Attention": ""},
    "x-transformers": {"x_transformers.x_transformers:Attention": ""},
    "keras": {"keras.layers:MultiHeadAttention": "keras_attention"},
}
# Conventions of tutorials and repositories, as the classes of the tests write them.
TUTORIALS = {
    "annotated_clones:MultiHeadedAttention": (
        "Annotated Transformer: h, d_model; four clones; weights on self.attn"
    ),
    "gpt_causal:CausalSelfAttention": "minGPT, nanoGPT: a config; always causal",
    "mean_weights:SelfAttention": "SelfAttention(embed_size, heads); values, keys, query, mask",
    "d2l_valid_lens:MultiHeadAttention": "d2l: num_hiddens; valid_lens",
    "no_proj_no_scale:MultiHeadSelfAttention": (
        "d_in, d_out, context_length; no projection, no scale"
    ),
    "padding_and_additive:MHA": "fairseq: attn_mask added, key_padding_mask dropped",
    "memory_and_padding:CrossAttention": "DETR: tgt, memory, memory_key_padding_mask",
    "sequence_first:MultiHeadAttention": "labml: (L, B, D), masks (L, S, B)",
    "sdpa_grouped:GroupedQueryAttention": "Llama from scratch: n_kv_heads",
    "einops_kv_fused:CrossAttention": "lucidrains: x, context; to_kv; dim_head",
    "dict_output:SelfAttention": "outputs in a dict",
    "bert_style:BertAttention": "hidden_states, attention_mask added",
    "vit_fused_qkv:Attention": "ViT: qkv, proj",
}
HEADER = """# Raw classes of published packages

Given to `mha check` as they are, quick profile, float32, CPU (`python docs/raw_classes.py`). \
"Understood": formula,
projections, masks and weights are tested by trial runs; "assumed" names the rows that are not. \
The lines are those of
the function in [raw_classes_by_hand.py](raw_classes_by_hand.py) that adapts a class by hand, \
whose verdict is then
given. {stood_in} are stood in for: nothing that was judged uses them.

| class | understood | by hand | verdict | judged | fails (required) | advice |
|---|---|---|---|---|---|---|
"""


class StandIn(types.ModuleType):
    """A module of which any name can be imported."""

    __path__ = ()
    __version__ = "0.99"

    def __getattr__(self, name):
        """Return a class; called with a function, as a decorator is, it returns that."""
        if name.startswith("__"):
            raise AttributeError(name)
        return NamedAnything(
            name, (), {"__new__": _made, "__call__": lambda self, function: function}
        )


class NamedAnything(type):
    """A class with any attribute, such as the members of an enumeration."""

    def __getattr__(cls, name):
        """Return the name itself."""
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _made(cls, *arguments, **options):
    return arguments[0] if arguments and callable(arguments[0]) else object.__new__(cls)


class Finder(MetaPathFinder, Loader):
    """Finds the packages that are stood in for."""

    def find_spec(self, name, path=None, target=None):
        """Return the spec of a stand-in."""
        if name.partition(".")[0] in STOOD_IN:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        """Return a stand-in."""
        return StandIn(spec.name)

    def exec_module(self, module):
        """Run nothing."""


def row(title: str, target: str, by_hand: str, *, judged: bool) -> str:
    """Return the row of one class, with a verdict if it is to be judged."""
    lines = ""
    try:
        (resolved,) = resolve(target)
        understood = understood_in(resolved)
    except ImplementationError as error:
        cause = str(error).partition(". Declare it")[0].partition("needs a declaration: ")
        understood = f"no: {cause[2] or cause[0]}"
        if not by_hand:
            return f"| {title} | {understood} | | | | | |"
        (resolved,) = resolve(f"{HERE / 'raw_classes_by_hand.py'}:{by_hand}")
        lines = str(lines_of(by_hand))
    verdict = verdict_on(resolved) if judged else "not judged | | |"
    return f"| {title} | {understood} | {lines} | {verdict} |"


def understood_in(resolved: Resolved) -> str:
    """Return whether a class is understood, or the topics on which it is only assumed."""
    assumed = []
    for inferred in resolved.inference.rows:
        if inferred.evidence.startswith("assumed"):
            assumed.append(inferred.topic)
    return f"assumed: {', '.join(assumed)}" if assumed else "yes"


def lines_of(by_hand: str) -> int:
    """Return how many lines of code a function in raw_classes_by_hand.py has."""
    function = getattr(sys.modules["raw_classes_by_hand"], by_hand)
    return sum(bool(line.strip()) for line in inspect.getsource(function).splitlines())


def verdict_on(resolved: Resolved) -> str:
    """Judge a class; return the cells of its verdict, and of what fails or is advised."""
    report = check(resolved.implementation, "quick", dtypes=["float32"])
    judged, failed, advice = 0, [], []
    for verdict in report.verdicts:
        if verdict.status in ("not_claimed", "blocked"):
            continue
        judged += 1
        if not verdict.conforms:
            failed.append(verdict.clause)
        elif verdict.status != "pass":
            advice.append(verdict.clause)
    outcome = "conforms" if report.conforms else "fails"
    return f"{outcome} | {judged} | {', '.join(failed)} | {', '.join(advice)}"


def main(only: list[str], *, judged: bool) -> None:
    """Print the rows of targets that contain one of the words; without words, write the page."""
    sys.meta_path.append(Finder())
    warnings.simplefilter("ignore")
    rows = []
    for package, targets in PACKAGES.items():
        for target, by_hand in targets.items():
            if not only or any(word in target for word in only):
                module, _, name = target.partition(":")
                title = f"{package} {version(package)}: `{module.rpartition('.')[2]}.{name}`"
                rows.append(row(title, target, by_hand, judged=judged))
                print(rows[-1], flush=True)
    folder = HERE.parent / "tests" / "readings" / "classes"
    for name, convention in TUTORIALS.items():
        if not only or any(word in name for word in only):
            rows.append(row(convention, f"{folder / name.replace(':', '.py:')}", "", judged=judged))
            print(rows[-1], flush=True)
    if not only:
        page = HEADER.format(stood_in=", ".join(STOOD_IN)) + "\n".join(rows) + "\n"
        (HERE / "raw-classes.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "torch")
    main([word for word in sys.argv[1:] if word != "--infer"], judged="--infer" not in sys.argv)
