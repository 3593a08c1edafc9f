# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are a pure function of what they are for, and the split between training and evaluation.

An initial state is named by `(task_id, episode)`. Episode numbers below `TRAIN_EPISODES` are for evaluation only;
the training sequence of seed s starts at `(s + 1) * TRAIN_EPISODES`.
"""

from __future__ import annotations

import numpy as np

TRAIN_EPISODES = 2**32
TUNING_EPISODES = 2**31  # evaluation numbers from here on are for tuning, those below for results


def first_training_episode(seed: int) -> int:
    """The first episode number of the training sequence of `seed`."""
    return (seed + 1) * TRAIN_EPISODES


def uniforms(task_id: np.ndarray, episode: np.ndarray, count: int, stream: int = 0) -> np.ndarray:
    """(M, count) float64 in [0, 1), a pure function of each row's `(task_id, episode)` and of `stream`.

    A counter-based generator in one vectorised expression (one numpy Generator per row costs 20 microseconds):
    SplitMix64's finaliser (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195) over a mixed counter.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        key = _mix(np.asarray(task_id).astype(np.uint64) + golden * np.uint64(2 * stream + 1))
        key = _mix(key ^ _mix(np.asarray(episode).astype(np.uint64) + golden))
        words = _mix(key[:, None] + golden * np.arange(1, count + 1, dtype=np.uint64))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
