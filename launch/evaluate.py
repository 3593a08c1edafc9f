# SPDX-License-Identifier: Apache-2.0
"""Evaluate a checkpoint or an expert. Thin over `robo_rl.app`; `--help` explains."""

import sys

from robo_rl.app.cli import evaluate

if __name__ == "__main__":
    sys.exit(evaluate())
