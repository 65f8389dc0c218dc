"""Short import path of Run: see cleanrl_utils/running/run.py."""

from cleanrl_utils.running.run import PixelArgs, Run, RunArgs, TorchArgs, parse_args, require

__all__ = ["PixelArgs", "Run", "RunArgs", "TorchArgs", "parse_args", "require"]
