"""Inputs: their order and their axes, and a memory that may be left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.implementations import ImplementationError, from_module
from mha.implementations.inference.infer import infer
from support.judging import expect_fail
from support.options import Plain
from support.readings import expect_read, is_tested
from support.right_classes import Fused, Heads, Separate, hidden

# To look for causes takes longer than to judge; tests/diagnosis does that.
pytestmark = pytest.mark.usefixtures("undiagnosed")


class MemoryFirst(Heads):
    """As in a course: the encoder's output comes first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.of(y, x, x)


class SourceFirst(Heads):
    """As in code for translation."""

    def forward(self, src: Tensor, tgt: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.of(tgt, src, src, mask)


class MemorySecond(Heads):
    """The name of the second input is not known."""

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.of(x, z, z)


class EncoderSecond(Heads):
    """Two inputs with one word in common."""

    def forward(self, decoder_x: Tensor, encoder_x: Tensor) -> Tensor:
        return self.of(decoder_x, encoder_x, encoder_x)


class ImageOfPixels(Fused):
    """(B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        return super().forward(x.reshape(batch, height * width, channels)).view(x.shape)


class Flattened(ImageOfPixels):
    """Returns the pixels of an image in one axis."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(1, 2)


class ChannelsFirst(Fused):
    """(B, C, N), though no layer is a convolution."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Pointwise(nn.Conv2d):
    """A package's own convolution of single pixels."""

    def __init__(self, width: int, outputs: int, bias: bool = True) -> None:
        super().__init__(width, outputs, 1, bias=bias)


class OfPixels(nn.Module):
    """As in diffusion models: images (B, C, H, W), and convolutions of single pixels."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if heads <= 0 or dim <= 0 or dim % heads:
            raise ValueError(f"dim ({dim}) must be a positive multiple of heads ({heads})")
        self.heads = heads
        self.to_qkv, self.to_out = Pointwise(dim, 3 * dim, bias=False), Pointwise(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).flatten(2).unflatten(1, (3, self.heads, -1)).unbind(1)
        weights = (q.mT @ k / math.sqrt(q.shape[2])).softmax(-1)
        return self.to_out((v @ weights.mT).reshape(x.shape))  # type: ignore[no-any-return]  # of nn.Module


class OfTokensInFrames(Fused):
    """(B, T, N, D): attention between the N tokens of a frame."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view(x.shape)


class OfImage(Separate):
    """As in PVT and SegFormer: what follows the input is the height and the width of an image."""

    def forward(self, x: Tensor, H: int, W: int) -> Tensor:
        assert x.shape[1] == H * W
        return self.attend(x, x, x)[0]


class FromTheStart(Fused):
    """What decoders require, without a cache and rotary positions."""

    def forward(  # type: ignore[override]  # more inputs
        self, x: Tensor, start_pos: int, freqs_cis: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        assert start_pos == 0
        assert freqs_cis is None
        return self.attend(x, 0.0 if mask is None else hidden(mask).to(x))[0]


class NamedInputs(Separate):
    """Its inputs must be given by name."""

    def forward(  # type: ignore[override]  # other inputs
        self, *, x: Tensor, context: Tensor | None = None
    ) -> Tensor:
        context = x if context is None else context
        return self.attend(x, context, context)[0]


class FlagCalledBias(Fused):
    """A flag of `forward` has a name that others give to a mask."""

    def forward(self, x: Tensor, bias: bool = True) -> Tensor:
        output = super().forward(x)
        return output if bias else output - self.out.bias


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (MemoryFirst, "y as query, and x as key and value, of shape"),
        (SourceFirst, "tgt as query, and src as key and value, of shape"),
        (ImageOfPixels, "of shape (b, l, 1, d)"),
        (ChannelsFirst, "of shape (b, d, l)"),
        (OfPixels, "one, as self-attention, of shape (b, d, l, 1)  [tested]"),
        (OfImage, "H=L, W=1  [by name]"),
        (FromTheStart, "start_pos=0, freqs_cis=None"),
        (MemorySecond, "query, and z as key and value, of shape"),
        (EncoderSecond, "query, and encoder_x as key and value"),
        (Flattened, "of shape (b, l, 1, d)"),
        (OfTokensInFrames, "of shape (b, 1, l, d)"),
        (FlagCalledBias, "not judged   bias"),
        (NamedInputs, "x as query, and context as key and value, left out in self-attention"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_class_conforms_as_it_is_read(cls: type[nn.Module], row: str) -> None:
    expect_read(cls, row, "HED-1")


class OfThree(Separate):
    """Its inputs have names of their own, one of them like that of a memory."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return self.attend(x, y, z)[0]


def test_three_inputs_of_unknown_names_are_tested() -> None:
    assert is_tested(infer(OfThree))


class SwapsTarget(Heads):
    """Wrong: the names say which input is the query."""

    def forward(self, target: Tensor, memory: Tensor) -> Tensor:
        return self.of(memory, target, target)


def test_inputs_are_not_swapped_against_their_names() -> None:
    with pytest.raises(ImplementationError, match="its output is as long as memory"):
        infer(SwapsTarget)


class NeedsLandmarks(Plain):
    """Requires what has no known name."""

    def forward(self, x: Tensor, landmarks: Any) -> Any:  # type: ignore[override]  # another signature
        return super().forward(x + landmarks.sum())


def test_refusal_names_what_was_given_none_and_the_parameters() -> None:
    with pytest.raises(ImplementationError) as raised:
        infer(NeedsLandmarks)
    message = str(raised.value)
    assert "AttributeError: 'NoneType' object has no attribute 'sum'" in message
    given = "forward also requires landmarks, of no known meaning, and was given None"
    assert given in message
    assert '"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "out"}' in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query_last": True}, "query_last=True, but it does not take two inputs"),
        ({"memory_optional": True}, "memory_optional=True, but its calls have no memory"),
    ],
)
def test_option_of_inputs_that_are_not_there_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ImplementationError, match=message):
        from_module(nn.MultiheadAttention, parameters={}, **options)


class OneMask(Heads):
    """As in code of diffusion models: without a context, it attends to its input."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.of(x, x, x, mask)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        return self.alone(x, mask) if context is None else self.of(x, context, context, mask)


class TwoMasks(Heads):
    """One for each kind of call."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        self_mask: Tensor | None = None,
        cross_mask: Tensor | None = None,
    ) -> Tensor:
        if memory is None:
            return self.of(x, x, x, self_mask)
        return self.of(x, memory, memory, cross_mask)


class CausalAlone(OneMask):
    """As in a decoder."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.of(x, x, x, later if mask is None else mask | later)


class PositionsAlone(OneMask):
    """Positions count in self-attention."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        moved = x + torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return self.of(moved, moved, x, mask)


class NeedsMemory(OneMask):
    """It has a default, but cannot be left out."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        raise ValueError("the memory is missing")


class OtherMaskAlone(TwoMasks):
    """The two masks differ in what True means, which cannot be judged as one."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        self_mask: Tensor | None = None,
        cross_mask: Tensor | None = None,
    ) -> Tensor:
        return super().forward(x, memory, None if self_mask is None else ~self_mask, cross_mask)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (OneMask, "query, and context as key and value, left out in self-attention, of shape"),
        (TwoMasks, "self_mask or cross_mask: True = may not attend"),
        (CausalAlone, "calls without context  [unless declared]"),
        (PositionsAlone, "calls without context  [unless declared]"),
        (NeedsMemory, "calls without context  [unless declared]"),
        (OtherMaskAlone, "calls without memory, self_mask  [unless declared]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_memory_may_be_left_out_if_both_calls_are_attention(cls: type[nn.Module], row: str) -> None:
    result = expect_read(cls, row, "MSK-1")
    assert ("memory_optional=True" in result.declaration) == (cls in (OneMask, TwoMasks))


class ReturnsInputAlone(OneMask):
    """Without a context, cross-attention is skipped."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x


class MaskOfContextAlone(Heads):
    """The mask is of the context, and self-attention has none."""

    def forward(
        self, x: Tensor, context: Tensor | None = None, context_mask: Tensor | None = None
    ) -> Tensor:
        return self.of(x, x, x) if context is None else self.of(x, context, context, context_mask)


class OtherEmptyRowsAlone(OneMask):
    """Rows without a key get the mean of all values, and NaN beside a context."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, -1e30)
        return self.of(x, x, x, mask)


class WeightsOfContextAlone(OneMask):
    """Weights are returned with a context alone."""

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Any:
        output = super().forward(x, context, mask)
        if context is None:
            return output, None
        q, k = self.split(self.w_q(x)), self.split(self.w_k(context))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)
        return output, scores.softmax(-1)


@pytest.mark.parametrize(
    "cls",
    [ReturnsInputAlone, MaskOfContextAlone, OtherEmptyRowsAlone, WeightsOfContextAlone],
    ids=lambda cls: cls.__name__,
)
def test_calls_without_a_memory_that_differ_are_not_made(cls: type[nn.Module]) -> None:
    result = infer(cls)
    assert "calls without context" in result.report(400)
    assert not result.implementation.call.alone


class LeaksAlone(TwoMasks):
    """Long rows read the first key even if it is masked."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        self_mask: Tensor | None = None,
        cross_mask: Tensor | None = None,
    ) -> Tensor:
        if self_mask is not None and x.shape[1] > 8:
            self_mask = self_mask & (torch.arange(x.shape[1]) > 0)
        return super().forward(x, memory, self_mask, cross_mask)


class LongRowsUnscaledAlone(OneMask):
    """The scores of long rows are not scaled."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.of(x * (1.25 if x.shape[1] > 8 else 1.0), x, x, mask)


@pytest.mark.parametrize(
    ("cls", "clause"),
    [(LongRowsUnscaledAlone, "HED-1"), (LeaksAlone, "MSK-1")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong_without_a_memory_alone_fails(cls: type[nn.Module], clause: str) -> None:
    expect_fail(cls, clause)
