"""The names under which published functions take what a call says about the scores.

A function has at most one of the names of an option. Sources: the interfaces that the clauses name.
"""

from __future__ import annotations

from itertools import chain


def listed(names: str) -> tuple[str, ...]:
    """Return the names of a text, separated by spaces."""
    return tuple(names.split())


SCALE_NAMES = listed("scale softmax_scale sm_scale scaling attn_scale scale_factor")
# Of windows: two numbers, or one number or a pair.
WINDOW_PAIRS = (
    ("window_size_left", "window_size_right"),
    ("left_window_size", "right_window_size"),
    ("window_left", "window_right"),
    ("left_bound", "right_bound"),
)
WINDOW_NAMES = listed(
    """
    window_size local_window_size sliding_window_size sliding_window_length sliding_window
    window_left window
    """
)
SOFTCAP_NAMES = listed(
    """
    softcap soft_cap logit_cap logits_soft_cap attn_logits_soft_cap attn_logit_softcapping
    attention_logit_softcapping
    """
)
# The last one is a tile elsewhere.
CHUNK_NAMES = listed("attention_chunk attention_chunk_size chunk_size")
SINK_NAMES = listed(
    """
    sinks s_aux sink learnable_sink attention_sinks attention_sink attn_sinks attn_sink head_sink
    sink_logits
    """
)
SLOPES_NAMES = ("alibi_slopes", "alibi", "slopes")
# What asks for the log-sum-exp.
RETURN_LSE_NAMES = listed(
    """
    return_lse return_softmax_lse return_logsumexp return_residual return_attn_probs
    """
)


def acts_by_default(name: str, default: object) -> bool:
    """Return whether the default of an option about the scores is that of one model.

    A scale of 1 is not: the callers of such a function scale their queries.

    >>> acts_by_default("softcap", 50.0), acts_by_default("window_size", (127, 0))
    (True, True)
    >>> acts_by_default("softcap", 0.0), acts_by_default("scale", 1.0)
    (False, False)
    """
    if name in SCALE_NAMES:
        return type(default) is float and default > 0 and default != 1
    if name not in (*SOFTCAP_NAMES, *WINDOW_NAMES, *chain.from_iterable(WINDOW_PAIRS)):
        return False
    numbers = default if isinstance(default, tuple) else (default,)
    return any(type(number) in (int, float) and number > 0 for number in numbers)
