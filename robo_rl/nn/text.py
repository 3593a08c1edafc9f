# SPDX-License-Identifier: Apache-2.0
"""Instructions as word tokens, without a vocabulary file: words are hashed, so that unseen ones have an embedding too.

Axes: M texts, L words of the longest text, B batch, W width.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robo_rl.errors import ConfigError

BUCKETS = 1024
HASHES = 2


def words(text: str) -> list[str]:
    """The words of a text in lower case; what is neither letter nor digit separates them."""
    return re.findall(r"\w+", text.casefold())


def word_ids(texts: Sequence[str], buckets: int = BUCKETS) -> tuple[Tensor, Tensor]:
    """(M, L, HASHES) int64 rows of an embedding table, and (M, L) bool, False beyond a text's end (there the ids are
    0).

    A word has one row in each of HASHES halves of the table, drawn by its hash; two words are the same only where all
    their rows are (one pair in a million). Python's own `hash` differs from process to process. Source: hash
    embeddings, Svenstrup et al. 2017, arXiv:1709.03933, with equal weights.
    """
    sentences = [words(text) for text in texts]
    longest = max((len(sentence) for sentence in sentences), default=0)
    ids = torch.zeros(len(texts), longest, HASHES, dtype=torch.int64)
    present = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, sentence in enumerate(sentences):
        for place, word in enumerate(sentence):
            digest = hashlib.blake2b(word.encode(), digest_size=8 * HASHES).digest()
            for i in range(HASHES):
                drawn = int.from_bytes(digest[8 * i : 8 * i + 8], "little") % buckets
                ids[row, place, i] = i * buckets + drawn
            present[row, place] = True
    return ids, present


class WordTokens(nn.Module):
    """`task_id` (B,) -> the words of its instruction as tokens (B, L, W).

    The weights do not depend on the texts: a policy trained on some instructions can be built for others.

    Attributes:
        padded: some texts are shorter than the longest, and `present` must be heeded.
    """

    ids: Tensor
    present: Tensor
    position: Tensor

    def __init__(self, texts: Sequence[str], width: int, buckets: int = BUCKETS):
        """`texts` by task_id. Raises ConfigError where one has no words."""
        super().__init__()
        for task, text in enumerate(texts):
            if not words(text):
                raise ConfigError(
                    f"Task {task} has no instruction to read: EnvSpec.tasks[{task}] is {text!r}. Leave `task_id` out "
                    "of policy.obs_keys, or give every task a text."
                )
        ids, present = word_ids(texts, buckets)
        self.padded = not bool(present.all())
        # Derived from the texts, so no part of a checkpoint.
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("present", present, persistent=False)
        self.register_buffer("position", waves(ids.shape[1], width), persistent=False)
        self.embedding = nn.Embedding(HASHES * buckets, width)
        nn.init.normal_(self.embedding.weight, std=HASHES**-0.5)

    def forward(self, task_id: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B, L, W), and (B, L) bool, False at padding."""
        # The few texts are embedded, not the batch.
        tokens = self.embedding(self.ids).sum(2) + self.position
        return tokens[task_id], self.present[task_id]


def waves(length: int, width: int) -> Tensor:
    """(length, width): sines and cosines of the place, from a radian a word to one in a thousand."""
    rates = 1000.0 ** -torch.linspace(0, 1, (width + 1) // 2)
    angle = torch.arange(length)[:, None] * rates
    return torch.cat([angle.sin(), angle.cos()], 1)[:, :width]
