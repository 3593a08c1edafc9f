# SPDX-License-Identifier: Apache-2.0
"""Train from data. Thin over `robo_rl.app`; `--help` explains."""

import sys

from robo_rl.app.cli import offline

if __name__ == "__main__":
    sys.exit(offline())
