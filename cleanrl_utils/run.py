"""Short import path of Run: see cleanrl_utils/running/run.py."""

from cleanrl_utils.running.run import (
    LargeArgs,
    PixelArgs,
    Run,
    RunArgs,
    TorchArgs,
    parse_args,
    require,
)

__all__ = ["LargeArgs", "PixelArgs", "Run", "RunArgs", "TorchArgs", "parse_args", "require"]
