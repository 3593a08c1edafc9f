# SPDX-License-Identifier: Apache-2.0
"""Transformer blocks: one that attends to itself, and one that also reads a context whose keys and values are given.

Axes: B batch, T tokens of a context, Q own tokens, W width, D = W / heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

MLP_RATIO = 2  # twice the width: a third less work than the usual four times


class Block(nn.Module):
    """Pre-norm self-attention and MLP, (B, Q, W) -> (B, Q, W). Order is known from positions in the tokens only."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = feedforward(width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`bias`, broadcast to (B, heads, Q, Q), is added to the attention's logits: -inf hides a token."""
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(self.norm_attention(x)).chunk(3, -1))
        x = x + self.out(merge_heads(scaled_dot_product_attention(q, k, v, bias)))
        return x + self.mlp(self.norm_mlp(x))


class ContextBlock(nn.Module):
    """A block whose tokens read themselves and a context, and whose norms a condition scales and shifts.

    The context never reads these tokens, so its keys and values can be computed once and kept. Source of the
    conditioning: the adaptive layer norm of DiT (Peebles and Xie 2023, arXiv:2212.09748, section 3.2), without its
    gates, which would shut the context out until they have learned to open.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 4 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = feedforward(width)

    def forward(
        self,
        x: Tensor,
        condition: Tensor,
        keys: Tensor,
        values: Tensor,
        context_bias: Tensor | None = None,
        own_bias: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            x: (B, Q, W) own tokens.
            condition: (B, C, W), each of the C for Q / C tokens in a row.
            keys, values: (B, heads, T, D) of the context.
            context_bias: broadcast to (B, heads, Q, T), added to the logits; `own_bias` likewise to (B, heads, Q, Q).

        Returns:
            (B, Q, W).
        """
        modulation = self.modulation(condition).repeat_interleave(x.shape[1] // condition.shape[1], dim=1)
        scale_attention, shift_attention, scale_mlp, shift_mlp = modulation.chunk(4, -1)
        inner = torch.addcmul(shift_attention, self.norm(x), 1 + scale_attention)
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(inner).chunk(3, -1))
        read = attend_with_context(q, k, v, keys, values, context_bias, own_bias)
        x = x + self.out(merge_heads(read))
        return x + self.mlp(torch.addcmul(shift_mlp, self.norm(x), 1 + scale_mlp))


def attend_with_context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    context_bias: Tensor | None = None,
    own_bias: Tensor | None = None,
) -> Tensor:
    """Attention (B, heads, Q, D) over context and own tokens, as if they were one sequence.

    They are not made one: copying a long context behind every few own tokens costs more than attending to it (6.9
    against 2.8 ms for 256 rows of 4 tokens and 58 of context).
    """
    q = q * q.shape[-1] ** -0.5
    to_context, to_own = q @ keys.transpose(-1, -2), q @ k.transpose(-1, -2)
    if context_bias is not None:
        to_context = to_context + context_bias
    if own_bias is not None:
        to_own = to_own + own_bias
    weights = torch.cat([to_context, to_own], -1).softmax(-1)
    length = keys.shape[2]
    return weights[..., :length] @ values + weights[..., length:] @ v


def feedforward(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, MLP_RATIO * width), nn.GELU(), nn.Linear(MLP_RATIO * width, width))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, Q, W) -> (B, heads, Q, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, heads, Q, D) -> (B, Q, W)."""
    return x.transpose(1, 2).flatten(2)
