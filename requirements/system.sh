#!/usr/bin/env bash
# Debian packages that tests and some environments use. Installs what is missing where it may
# (Debian, root); elsewhere it names them and goes on. The scripts themselves need none of these.
set -euo pipefail

packages=(
    libegl1 libgl1                      # MuJoCo pictures without a display: MUJOCO_GL=egl
    libqt5core5a libqt5gui5             # EnvPool's Procgen
    xvfb xauth                          # xvfb-run, as the benchmark commands use it
    chromium chromium-driver            # opens the reports and the docs in a real browser
    slurmctld slurmd slurm-client munge # a Slurm of one node, for the tests of the benchmark tool
)

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
    [[ $status == "install ok installed" ]] || missing+=("$package")
done
((${#missing[@]})) || exit 0

if [[ $(. /etc/os-release 2>/dev/null && echo "${ID:-}") == debian && $EUID == 0 ]]; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || echo "package lists are not fresh; trying with what is here" >&2
    apt-get install -y -qq --no-install-recommends "${missing[@]}"
else
    echo "Not installed, for want of Debian or root (tests that need them are skipped):"
    echo "  ${missing[*]}"
fi
