# An image with vlarl installed: on a CPU by default, with CUDA by a build argument.
#
#   docker build -t vlarl .
#   docker build -t vlarl:cuda --build-arg DEVICE=cuda --build-arg EXTRAS=libero,vllm .
#   docker run --rm -v "$PWD/runs:/home/vlarl/runs" vlarl train
#   docker run --rm --gpus all -v "$PWD/runs:/home/vlarl/runs" vlarl:cuda train libero_spatial_grpo_oft
#
# PyTorch's wheels bring the CUDA libraries along; the host needs a driver and the NVIDIA container toolkit.
FROM python:3.11-slim-bookworm

ARG DEVICE=cpu
ARG EXTRAS=""

RUN apt-get update -qq \
    && apt-get install -qq -y --no-install-recommends \
        build-essential cmake git libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri libosmesa6 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /usr/src/vlarl
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN case "$DEVICE" in \
        cpu) index="--index-url https://download.pytorch.org/whl/cpu" ;; \
        cuda) index="" ;; \
        *) echo "DEVICE is $DEVICE: build with DEVICE=cpu or DEVICE=cuda" >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir $index "torch==$(sed -n 's/^torch==//p' constraints.txt)" \
    && pip install --no-cache-dir -c constraints.txt ".${EXTRAS:+[$EXTRAS]}"

# Runs as a user without rights on the host's files beyond the mounted folder.
RUN useradd --create-home --uid 1000 vlarl
USER vlarl
WORKDIR /home/vlarl
ENTRYPOINT ["vlarl"]
CMD ["--help"]
