"""Where the original has this script. Ours is beside this folder: it needs no Python of its own."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    script = Path(__file__).resolve().parent.with_suffix(".py")
    runpy.run_path(str(script), run_name="__main__")
