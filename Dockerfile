# syntax=docker/dockerfile:1
# Runs any script, on CPU or GPU (JAX: on the CPU, see docs/get-started/installation.md):
#   docker build --build-arg COMMIT=$(git rev-parse HEAD) --tag cleanrl .
#   docker run --rm --gpus all --volume "$PWD/runs:/cleanrl/runs" cleanrl python cleanrl/ppo.py --seed 2
# EXTRAS names what is in it: any of requirements/requirements-NAME.txt. A smaller one, without GPU:
#   docker build --build-arg EXTRAS="atari" --build-arg TORCH_INDEX=<index of torch's CPU builds> .
FROM python:3.11-slim-bookworm

# Graphics without a display: MuJoCo renders with EGL; EnvPool's Procgen needs Qt; git names versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        git libegl1 libgl1 libglib2.0-0 libqt5core5a libqt5gui5 tini xauth xvfb \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH \
    MUJOCO_GL=egl \
    SDL_VIDEODRIVER=dummy
RUN python -m venv "$VIRTUAL_ENV"

# Dependencies before the code: a change of the code does not install them again. The package itself
# is installed as a folder (-e .), so its metadata and an empty shell of it must be there.
WORKDIR /cleanrl
ARG EXTRAS="atari envpool procgen mujoco dm_control box2d pettingzoo memory_gym jax playground optuna"
ARG TORCH_INDEX=""
COPY pyproject.toml README.md LICENSE ./
COPY requirements ./requirements
RUN mkdir cleanrl cleanrl_utils \
    && touch cleanrl/__init__.py cleanrl_utils/__init__.py \
    && echo "-r requirements.txt" > requirements/image.txt \
    && for extra in $EXTRAS; do \
        if [ "$extra $(uname -m)" = "pettingzoo aarch64" ]; then \
            echo "pettingzoo is left out: no package of its games for ARM"; continue; fi; \
        echo "-r requirements-$extra.txt" >> requirements/image.txt; done \
    && PIP_EXTRA_INDEX_URL="$TORCH_INDEX" python -m pip install --requirement requirements/image.txt \
    && case " $EXTRAS " in *" memory_gym "* | *" playground "*) \
        python -m pip install --no-deps --requirement requirements/no-deps.txt ;; esac

COPY cleanrl ./cleanrl
COPY cleanrl_utils ./cleanrl_utils
COPY benchmark ./benchmark

# Nobody needs root to train. Runs and videos are written below the working directory.
RUN useradd --create-home --uid 1000 cleanrl \
    && mkdir --parents runs videos wandb \
    && chown cleanrl:cleanrl /cleanrl runs videos wandb
USER 1000

ARG COMMIT=""
ENV CLEANRL_COMMIT=$COMMIT

# tini passes on the signal that ends a container, so that a run can be stopped and resumed.
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["python", "cleanrl/ppo.py", "--help"]
