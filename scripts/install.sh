#!/usr/bin/env bash
# Installs vlarl, with the given extras, into a virtual environment: scripts/install.sh VENV [EXTRAS]
# Where pip is configured with a folder (find-links) that holds a CPU wheel of torch, that wheel is taken and nothing
# of CUDA is downloaded; elsewhere torch comes from the index as usual.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
extras=${2:-}
python=${PYTHON:-python3}
torch_version=$(sed -n 's/^torch==//p' constraints.txt)

if [ ! -x "$venv/bin/python" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: vlarl needs Python 3.11 or newer, and $python is $("$python" --version 2>&1)." \
            "Name another: make PYTHON=python3.12 …" >&2
        exit 2
    }
    "$python" -m venv "$venv"
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check)
cpu_torch="torch==$torch_version+cpu"
if "${pip[@]}" install --quiet --dry-run --no-index --no-deps "$cpu_torch" >/dev/null 2>&1; then
    "${pip[@]}" install --quiet --no-index --no-deps "$cpu_torch"
fi
"${pip[@]}" install --quiet -c constraints.txt -e ".${extras:+[$extras]}"

# LIBERO's dependencies name torchvision, which nothing here uses; the index's build of it is for CUDA and breaks a CPU
# torch.
if "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
    "${pip[@]}" uninstall --quiet --yes torchvision torchaudio 2>/dev/null
fi
