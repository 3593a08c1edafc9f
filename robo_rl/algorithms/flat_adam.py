# SPDX-License-Identifier: Apache-2.0
"""The optimiser of ratio-based algorithms: Adam with one learning rate per group of parameters, one limit on the
gradient's norm, and a refusal to take a step that is not finite."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robo_rl.batch import Rollout
from robo_rl.errors import ConfigError, NonFiniteError
from robo_rl.nn.flat import flatten_parameters


class FlatAdam:
    """Each group becomes one flat parameter: see `flatten_parameters`. Gradients accumulate until `step`."""

    def __init__(
        self, groups: Sequence[tuple[Sequence[nn.Parameter], float]], max_grad_norm: float, epsilon: float = 1e-8
    ):
        """`groups` are parameters with their learning rate; the first one's is `learning_rate`.

        Raises ConfigError where that is not above 0.
        """
        groups = [(parameters, rate) for parameters, rate in groups if parameters]
        if groups[0][1] <= 0:
            raise ConfigError(f"algorithm.learning_rate is {groups[0][1]}: it must be above 0.")
        self.parameters = [flatten_parameters(parameters) for parameters, _ in groups]
        self.max_grad_norm = max_grad_norm
        self.learning_rate = groups[0][1]
        self._ratios = [rate / self.learning_rate for _, rate in groups]
        each = [{"params": [p], "lr": rate} for p, (_, rate) in zip(self.parameters, groups, strict=True)]
        self._adam = torch.optim.Adam(each, eps=epsilon, fused=True)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._adam.param_groups

    def set_learning_rate(self, rate: float) -> None:
        """Give the first group this learning rate; the others keep theirs in proportion."""
        self.learning_rate = rate
        for group, ratio in zip(self._adam.param_groups, self._ratios, strict=True):
            group["lr"] = rate * ratio

    def step(self, who: str, loss: Tensor, batch: Rollout) -> float:
        """Clip the common norm of all gradients, step, clear them; returns the norm before clipping.

        Args:
            who, loss, batch: the algorithm's name and what the gradient is of, for the error.

        Raises:
            NonFiniteError: the norm is not finite. A NaN anywhere in the loss or its gradient makes it so.
        """
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = math.hypot(*(grad.norm().item() for grad in grads))
        if not math.isfinite(norm):
            self.zero_grad()
            raise NonFiniteError(
                f"{who}'s gradient norm is {norm} (loss {float(loss.detach())}). The policy is "
                "as it was before this step. Look for extreme rewards or observations in the saved minibatch.",
                flat_tensors(batch),
            )
        if norm > self.max_grad_norm:
            for grad in grads:
                grad.mul_(self.max_grad_norm / (norm + 1e-6))
        self._adam.step()
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        for p in self.parameters:
            assert p.grad is not None  # flatten_parameters made it
            p.grad.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Learning rate and moments as flat tensors."""
        state = {"learning_rate": torch.tensor(self.learning_rate, dtype=torch.float64)}
        for index, moments in self._adam.state_dict()["state"].items():
            state |= {f"adam/{index}/{name}": value for name, value in moments.items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict` of the same groups; other keys are left alone."""
        moments: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for key, value in state.items():
            kind, _, rest = key.partition("/")
            if kind == "adam":
                index, name = rest.split("/")
                moments[int(index)][name] = value
        self._adam.load_state_dict({"state": dict(moments), "param_groups": self._adam.state_dict()["param_groups"]})
        self.set_learning_rate(float(state["learning_rate"]))


def flat_tensors(batch: Rollout) -> dict[str, Tensor]:
    """A batch as one flat dict of its own tensors, for saving."""
    out = {f"obs/{k}": v for k, v in batch.obs.items()} | {f"trace/{k}": v for k, v in batch.sample.trace.items()}
    out["action"] = batch.sample.action
    named = {"log_prob": batch.sample.log_prob, "value": batch.sample.value}
    for name in ("reward", "terminated", "truncated", "valid", "next_value", "ids", "advantage", "value_target"):
        named[name] = getattr(batch, name)
    out |= {k: v for k, v in named.items() if v is not None}
    return {k: v.detach().contiguous().clone() for k, v in out.items()}
