# SPDX-License-Identifier: Apache-2.0
"""Train in simulation. Thin over `robo_rl.app`; `--help` explains."""

import sys

from robo_rl.app.cli import train

if __name__ == "__main__":
    sys.exit(train())
