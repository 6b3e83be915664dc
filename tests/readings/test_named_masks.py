"""Masks of uncommon names, and masks of one kind of call alone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.implementations.adapters.signature import signature_of
from mha.implementations.inference.infer import infer
from support.judging import judged
from support.readings import expect_read
from support.right_classes import Heads

# To look for causes and simpler cases takes longer than to judge; tests/diagnosis does the first.
pytestmark = pytest.mark.usefixtures("undiagnosed", "unshrunk")


class LookAheadMask(Heads):
    """As in ports from Keras."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        look_ahead_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        return self.of(
            q, k, v, look_ahead_mask, None if padding_mask is None else padding_mask[:, None, None]
        )


class CausalMaskOfPairs(Heads):
    """A mask, though this name is often that of a flag; beside it, attention_mask is of padding."""

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, causal_mask: Tensor | None = None
    ) -> Tensor:
        return self.of(
            x, x, x, causal_mask, None if attention_mask is None else attention_mask[:, None, None]
        )


class TargetMask(Heads):
    """The only mask."""

    def forward(self, x: Tensor, trg_mask: Tensor | None = None) -> Tensor:
        return self.of(x, x, x, trg_mask)


class MaskOfMemory(Heads):
    """As in BERT: attention_mask is for self-attention alone."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        encoder_states: Tensor | None = None,
    ) -> Tensor:
        if encoder_hidden_states is None:
            return self.of(hidden_states, hidden_states, hidden_states, attention_mask)
        return self.of(
            hidden_states, encoder_hidden_states, encoder_hidden_states, encoder_attention_mask
        )


class MaskOfNoMemory(Heads):
    """As in GPT-2: a memory is refused."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        if encoder_hidden_states is not None:
            raise ValueError("there is no cross-attention here")
        return self.of(hidden_states, hidden_states, hidden_states, attention_mask)


class MaskOfAnotherMemory(Heads):
    """As in x-transformers: `mem_mask` is of `mem`, and not of the context."""

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        attn_mask: Tensor | None = None,
        mem: Tensor | None = None,
        mem_mask: Tensor | None = None,
    ) -> Tensor:
        if mem is not None:
            raise NotImplementedError
        memory = x if context is None else context
        return self.of(x, memory, memory, attn_mask)


class LabelsBesidePadding(Heads):
    """What has the word mask in its name is of something else."""

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, mask_labels: Tensor | None = None
    ) -> Tensor:
        return self.of(
            x, x, x, None if key_padding_mask is None else key_padding_mask[:, None, None]
        )


class CrossMaskLate(Heads):
    """Wrong with a memory alone: weights of hidden keys become 0, and the others do not grow."""

    def forward(
        self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        if memory is None or mask is None:
            return self.of(
                x, x if memory is None else memory, x if memory is None else memory, mask
            )
        q, k, v = (
            self.split(self.w_q(x)),
            self.split(self.w_k(memory)),
            self.split(self.w_v(memory)),
        )
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) * ~mask
        output: Tensor = self.w_o((weights @ v).transpose(1, 2).flatten(2))
        return output


class ThreeAxesForItems(Heads):
    """A mask of three axes is of items, not heads; key padding is an argument of its own."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        pairs = (
            attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        )
        return self.of(
            query,
            key,
            value,
            pairs,
            None if key_padding_mask is None else key_padding_mask[:, None, None],
        )


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize(
    ("cls", "row", "judged"),
    [
        (
            LookAheadMask,
            (
                "look_ahead_mask: True = may not attend, broadcastable to (b, h, l, s);"
                " padding_mask: True"
            ),
            "CAU-1",
        ),
        (
            CausalMaskOfPairs,
            (
                "causal_mask: True = may not attend, broadcastable to (b, h, l, s); attention_mask:"
                " True"
            ),
            "CAU-1",
        ),
        (
            TargetMask,
            "trg_mask: True = may not attend, broadcastable to (b, h, l, s)  [tested]",
            "MSK-1",
        ),
        (
            MaskOfMemory,
            (
                "attention_mask or encoder_attention_mask: True = may not attend, broadcastable to"
                " (b, h, l, s)  [tested]"
            ),
            "MSK-1",
        ),
        (
            MaskOfNoMemory,
            "attention_mask: True = may not attend, broadcastable to (b, h, l, s)  [tested]",
            "MSK-1",
        ),
        (
            MaskOfAnotherMemory,
            "attn_mask: True = may not attend, broadcastable to (b, h, l, s)  [tested]",
            "MSK-1",
        ),
        (LabelsBesidePadding, "mask_labels  [unless declared]", "MSK-1"),
        (ThreeAxesForItems, "attn_mask: True = may not attend, of 1, 2 or 4 dimensions", "MSK-5"),
    ],
)
def test_class_conforms_as_it_is_read(cls: type[nn.Module], row: str, judged: str) -> None:
    expect_read(cls, row, judged)


class SharedMaskIgnored(TargetMask):
    """Wrong: a mask that all items share counts for the first one only."""

    def forward(self, x: Tensor, trg_mask: Tensor | None = None) -> Tensor:
        if trg_mask is not None and trg_mask.dim() == 4 and len(trg_mask) == 1:
            trg_mask = torch.cat(
                [trg_mask, torch.zeros_like(trg_mask).expand(len(x) - 1, -1, -1, -1)]
            )
        return super().forward(x, trg_mask)


class ClampedPairs(ThreeAxesForItems):
    """Wrong: masks of numbers with two axes lose their infinities."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.is_floating_point():
            attn_mask = attn_mask.clamp(min=-1.0)
        return super().forward(query, key, value, attn_mask, key_padding_mask)


@pytest.mark.mostly_slow(1)
@pytest.mark.filterwarnings("ignore:.*is read as what it is nearest to")
@pytest.mark.parametrize("cls", [SharedMaskIgnored, CrossMaskLate, ClampedPairs])
def test_mask_that_is_read_wrong_fails(cls: type[nn.Module]) -> None:
    assert not judged(cls, ["MSK-1", "MSK-2", "MSK-5"]).conforms


class OtherMasks(Heads):
    """No mask of the attention has the word in its name, but three other options have."""

    def forward(
        self,
        x: Tensor,
        mask_value: float = -1e9,
        mask_type: str | None = None,
        block_mask: Any = None,
    ) -> Tensor:
        assert block_mask is None
        return self.of(x, x, x)


def test_word_in_a_name_does_not_decide() -> None:
    assert "not judged   mask_value, mask_type, block_mask  [unless declared]" in infer(
        OtherMasks
    ).report(400)


def keeps(x: Tensor, keep: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
    raise NotImplementedError


def convolves(x: Tensor, padding: int = 1, keep: float = 0.9) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "masks"), [(keeps, ("keep", "padding")), (convolves, (None, None))]
)
def test_masks_need_no_word_for_one(function: Any, masks: tuple[str | None, ...]) -> None:
    found = signature_of(inspect.signature(function).parameters, padding=True)
    assert (found.mask, found.padding) == masks
