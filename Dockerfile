# The library and its commands, for one GPU or a cluster: docs/install.md. Packages are pinned in pyproject.toml alone.
# CUDA as torch's wheels bring it; "devel", because DeepSpeed compiles its CPU optimizer and torch.compile its kernels at run time.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Ubuntu keeps only the newest build of a package, so a pinned one cannot be installed for long.
# wget: KubeRay's probes. pdsh, openssh-client: `deepspeed --hostfile`. ninja: DeepSpeed's compiled parts.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        g++ git ninja-build openssh-client pdsh python3-dev python3-venv wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 vit \
    && useradd --uid 10001 --gid 10001 --create-home --home-dir /vit vit

ENV PATH=/opt/vit/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# The packages, in a layer that only a change of pyproject.toml renews. torch first: DeepSpeed's build looks for it.
WORKDIR /opt/source
COPY pyproject.toml ./
RUN python3 -m venv /opt/vit \
    && python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*project['dependencies'], *project['optional-dependencies']['fast'], sep='\n')" > requirements.txt \
    && grep -E '^(torch|setuptools)==' requirements.txt > first.txt \
    && pip install -r first.txt \
    && pip install --no-build-isolation -r requirements.txt

COPY README.md LICENSE ./
COPY pipeline/ pipeline/
COPY data_tools/ data_tools/
COPY launch/ launch/
COPY configs/ configs/
RUN pip install --no-deps --no-build-isolation . \
    && rm -rf build ./*.egg-info

USER 10001:10001
WORKDIR /vit
CMD ["vit", "--help"]
