# SPDX-License-Identifier: Apache-2.0
"""Networks as actors and policies. `make` builds one from its configuration for an environment's spec."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from policies.categorical import CategoricalConfig
from policies.flow.config import FlowConfig
from policies.gaussian import GaussianConfig

if TYPE_CHECKING:
    from policies.categorical import CategoricalPolicy
    from policies.flow.policy import FlowPolicy
    from policies.gaussian import GaussianPolicy
    from robo_rl.types import EnvSpec

PolicyConfig: TypeAlias = GaussianConfig | CategoricalConfig | FlowConfig


def make(config: PolicyConfig, spec: EnvSpec) -> GaussianPolicy | CategoricalPolicy | FlowPolicy:
    """The policy that `config` describes, with fresh weights, shaped for `spec`."""
    match config:
        case GaussianConfig():
            from policies.gaussian import GaussianPolicy

            return GaussianPolicy(config, spec)
        case CategoricalConfig():
            from policies.categorical import CategoricalPolicy

            return CategoricalPolicy(config, spec)
        case FlowConfig():
            from policies.flow.policy import FlowPolicy

            return FlowPolicy(config, spec)
