"""Check that the probes have a margin: python tests/check_probes.py [words of cases, as pytest -k].

Every probe of tests/table.py runs with seeds 1 to 5, with and without the CPU's vector
instructions, whose rounding differs. Each must use at most half of its tolerance. Prints a table.
"""

import os
import subprocess
import sys
import tempfile
import time

PLAIN = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
SEEDS = range(1, 6)
MOST = 0.5


def check(words: list[str]) -> bool:
    """Run the probes whose names contain one of these words; True if all have a margin."""
    from probe_cases import CASES, learn_probe

    good = True
    os.chdir(tempfile.mkdtemp())
    for script, probe in CASES:
        case = f"{script}-{probe}"
        if words and not any(word in case for word in words):
            continue
        began = time.process_time()
        used = {seed: learn_probe(script, probe, seed) for seed in SEEDS}
        worst = max(used, key=lambda seed: used[seed])
        verdict = "" if used[worst] <= MOST else "too much"
        seconds = (time.process_time() - began) / len(used)
        print(f"{case:45} {worst:5} {used[worst]:9.0%} {seconds:9.1f} s  {verdict}", flush=True)
        good = good and not verdict
    return good


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--child"]
    if "--child" in sys.argv:
        sys.exit(0 if check(words) else 1)
    failed = False
    for name, settings in {"all instructions": {}, "SSE4.1 at most": PLAIN}.items():
        print(f"{name + ':':45} {'worst':>5} {'tolerance':>9} {'CPU time':>11}")
        print(f"{'':45} {'seed':>5} {'used':>9} {'per seed':>11}", flush=True)
        command = [sys.executable, __file__, "--child", *words]
        environment = {**os.environ, **settings}
        done = subprocess.run(command, env=environment, stderr=subprocess.DEVNULL)
        failed = failed or done.returncode != 0
    sys.exit("some probes use more than half of their tolerance" if failed else 0)
