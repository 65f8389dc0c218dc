"""Tools that run experiments: everything scripts share that cannot move a learning curve."""

import sys

if sys.argv[:1] == ["-m"]:  # python -m cleanrl_utils.NAME, whose imports take a second
    from cleanrl_utils.errors import quiet_interrupts

    quiet_interrupts()
