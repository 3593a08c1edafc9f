# SPDX-License-Identifier: Apache-2.0
"""robo-rl: embodied reinforcement learning from simulator to robot."""

__version__ = "0.1.0"
