"""Attention in the style of published decoders, each of which rotates or norms queries and keys."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """As in Llama: in float32, and then times the weight."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class GemmaNorm(RMSNorm):
    """As in Gemma: times 1 + weight, before it is cast."""

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def angles(width, base, length, device):
    inv_freq = 1.0 / (base ** (torch.arange(0, width, 2, device=device).float() / width))
    return torch.outer(torch.arange(length, device=device).float(), inv_freq)


class Decoder(nn.Module):
    """What they share: four layers, and attention to heads (B, heads, L, d_k)."""

    bias = False

    def __init__(self, hidden_size, num_heads, num_kv_heads=None):
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} must be divisible by {num_heads}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_dim = hidden_size // num_heads
        kv_width = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=self.bias)
        self.k_proj = nn.Linear(hidden_size, kv_width, bias=self.bias)
        self.v_proj = nn.Linear(hidden_size, kv_width, bias=self.bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=self.bias)

    def heads(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))

    def attend(self, q, k, v, mask=None, causal=False):
        repeats = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def turn(self, x, cos, sin, role):
        return x * cos + rotate_half(x) * sin

    def norm(self, x, role):
        return x


class Llama(Decoder):
    """Frequencies in a buffer, and positions inside."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None, rope_theta=500000.0):
        super().__init__(hidden_size, num_heads, num_kv_heads)
        exponents = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        self.register_buffer("inv_freq", 1.0 / rope_theta**exponents, persistent=False)

    def forward(self, hidden_states, attention_mask=None):
        q, k, v = self.heads(hidden_states)
        positions = torch.arange(q.shape[2], device=q.device).float()
        freqs = torch.outer(positions, self.inv_freq.float())
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos().to(q.dtype), emb.sin().to(q.dtype)
        q, k = self.turn(q, cos, sin, "q"), self.turn(k, cos, sin, "k")
        return self.attend(q, k, v, attention_mask)


class GivenTables(Decoder):
    """As in transformers: cosines and sines are given for each position."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None):
        q, k, v = self.heads(hidden_states)
        cos, sin = position_embeddings
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = self.norm(q, "q"), self.norm(k, "k")
        q, k = self.turn(q, cos, sin, "q"), self.turn(k, cos, sin, "k")
        return self.attend(q, k, v, attention_mask)


class MaskedLlama(Llama):
    """Its mask is required, as it is added to the scores."""

    def forward(self, hidden_states, attention_mask):
        return super().forward(hidden_states, attention_mask + 0.0)


class MaskedTables(GivenTables):
    """The same with tables that are given."""

    def forward(self, hidden_states, position_embeddings: tuple, attention_mask):
        return super().forward(hidden_states, position_embeddings, attention_mask + 0.0)


class Qwen3(GivenTables):
    """Each head is normed before it is rotated."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None, rms_norm_eps=1e-5):
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.q_norm = RMSNorm(self.head_dim, rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, rms_norm_eps)

    def norm(self, x, role):
        return self.q_norm(x) if role == "q" else self.k_norm(x)


class Gemma3(Decoder):
    """A norm whose weight is added to 1, and tables inside."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None, rope_theta=1000000.0):
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.rope_theta = rope_theta
        self.q_norm, self.k_norm = GemmaNorm(self.head_dim), GemmaNorm(self.head_dim)

    def norm(self, x, role):
        return self.q_norm(x) if role == "q" else self.k_norm(x)

    def forward(self, hidden_states, attention_mask=None):
        q, k, v = self.heads(hidden_states)
        q, k = self.norm(q, "q"), self.norm(k, "k")
        freqs = angles(self.head_dim, self.rope_theta, q.shape[2], q.device)
        emb = torch.cat((freqs, freqs), -1)
        cos, sin = emb.cos().to(q.dtype), emb.sin().to(q.dtype)
        q, k = self.turn(q, cos, sin, "q"), self.turn(k, cos, sin, "k")
        return self.attend(q, k, v, attention_mask)


class Nanochat(Decoder):
    """Rotated the other way, and then normed without a weight; always causal."""

    def turn(self, x, cos, sin, role):
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)

    def norm(self, x, role):
        return F.rms_norm(x, (x.size(-1),))

    def forward(self, x, cos_sin, kv_cache=None):
        q, k, v = (part.transpose(1, 2) for part in self.heads(x))
        cos, sin = cos_sin
        q, k = self.norm(self.turn(q, cos, sin, "q"), "q"), self.norm(self.turn(k, cos, sin, "k"), "k")
        return self.attend(*(part.transpose(1, 2) for part in (q, k, v)), causal=True)


class MiniMind(Decoder):
    """Tables of columns, for heads that are not yet transposed."""

    def forward(self, x, position_embeddings, attention_mask=None):
        q, k, v = (part.transpose(1, 2) for part in self.heads(x))
        cos, sin = position_embeddings
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = self.turn(q, cos, sin, "q"), self.turn(k, cos, sin, "k")
        return self.attend(*(part.transpose(1, 2) for part in (q, k, v)), mask=attention_mask)


class NeoX(nn.Module):
    """As in GPT-NeoX: one layer, interleaved by heads, and a quarter of each head is rotated."""

    def __init__(self, hidden_size, num_attention_heads, rotary_pct=0.25):
        super().__init__()
        assert hidden_size % num_attention_heads == 0
        self.n_heads, self.width = num_attention_heads, hidden_size // num_attention_heads
        self.rotary_ndims = int(self.width * rotary_pct)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def turn(self, x, cos, sin, role):
        turned, kept = x[..., : self.rotary_ndims], x[..., self.rotary_ndims :]
        return torch.cat((turned * cos + rotate_half(turned) * sin, kept), -1)

    def forward(self, hidden_states, attention_mask=None):
        qkv = self.query_key_value(hidden_states).unflatten(-1, (self.n_heads, 3 * self.width))
        q, k, v = qkv.transpose(1, 2).chunk(3, -1)
        freqs = angles(self.rotary_ndims, 10000, q.shape[2], q.device)
        emb = torch.cat((freqs, freqs), -1)
        cos, sin = emb.cos().to(q.dtype), emb.sin().to(q.dtype)
        q, k = self.turn(q, cos, sin, "q"), self.turn(k, cos, sin, "k")
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.dense(out.transpose(1, 2).flatten(2))


class GPTJ(Decoder):
    """Neighbouring columns of half of each head are rotated, by positions that are given."""

    def turn(self, x, cos, sin, role):
        width = self.head_dim // 2
        turned, kept = x[..., :width], x[..., width:]
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
        return torch.cat((turned * cos + other * sin, kept), -1)

    def forward(self, hidden_states, position_ids, attention_mask=None):
        q, k, v = self.heads(hidden_states)
        width = self.head_dim // 2
        inv_freq = 10000 ** (-torch.arange(0, width, 2, device=q.device).float() / width)
        freqs = position_ids.unsqueeze(-1).float() * inv_freq
        freqs = freqs.repeat_interleave(2, -1).unsqueeze(1)
        cos, sin = freqs.cos().to(q.dtype), freqs.sin().to(q.dtype)
        q, k = self.turn(q, cos, sin, "q"), self.turn(k, cos, sin, "k")
        return self.attend(q, k, v, attention_mask)


class OLMo2(Decoder):
    """All heads are normed at once, before they are split."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None):
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.q_norm = RMSNorm(hidden_size)
        self.k_norm = RMSNorm(self.num_kv_heads * self.head_dim)

    def norm(self, x, role):
        return self.q_norm(x) if role == "q" else self.k_norm(x)

    def heads(self, x):
        q, k, v = self.norm(self.q_proj(x), "q"), self.norm(self.k_proj(x), "k"), self.v_proj(x)
        return (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))

    def forward(self, hidden_states, cos, sin, attention_mask=None):
        q, k, v = self.heads(hidden_states)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = self.turn(q, cos, sin, "q"), self.turn(k, cos, sin, "k")
        return self.attend(q, k, v, attention_mask)


class ComplexLlama(Decoder):
    """As in Llama's own code: complex numbers for each position and pair of neighbours."""

    def turn(self, x, freqs_cis, role):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * freqs_cis).flatten(-2).type_as(x)

    def forward(self, x, freqs_cis, mask=None):
        q, k, v = self.heads(x)
        return self.attend(self.turn(q, freqs_cis, "q"), self.turn(k, freqs_cis, "k"), v, mask)


class ViT(nn.Module):
    """As in timm: one layer, and a layer norm of each head; no positions."""

    def __init__(self, dim, num_heads=8):
        super().__init__()
        assert dim % num_heads == 0
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)

    def norm(self, x, role):
        return self.q_norm(x) if role == "q" else self.k_norm(x)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self.norm(q, "q"), self.norm(k, "k"), v)
        return self.proj(out.transpose(1, 2).flatten(2))
