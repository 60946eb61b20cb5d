# quipu in a container (docs/operate/containers.md).
#
#     docker build -t quipu .                          # for CPUs: with torch's CPU build, without CUDA
#     docker build -t quipu:gpu --build-arg DEVICE=gpu .   # for NVIDIA GPUs: torch's CUDA build and Triton, 5 GB more
#
# Three stages: the wheel, with kernels compiled for every instruction set; what it needs; and the two without compilers.

ARG PYTHON=3.13

# ------------------------------------------------------------------ the wheel
FROM python:${PYTHON}-slim-bookworm AS wheel
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY . .
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# ------------------------------------------------------------------ what it needs
FROM python:${PYTHON}-slim-bookworm AS install
ARG DEVICE=cpu
COPY constraints.txt /build/
RUN python -m venv /opt/quipu
# torch first, and for CPUs from PyTorch's index: what comes from PyPI is a build with gigabytes of CUDA
RUN torch="$(grep '^torch==' /build/constraints.txt)" \
    && if [ "$DEVICE" = gpu ]; then \
        /opt/quipu/bin/pip install --no-cache-dir "$torch"; \
    else \
        /opt/quipu/bin/pip install --no-cache-dir --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"; \
    fi
COPY --from=wheel /wheels /wheels
RUN extras="parquet,otel,remote" \
    && if [ "$DEVICE" = gpu ]; then extras="$extras,triton"; fi \
    && /opt/quipu/bin/pip install --no-cache-dir -c /build/constraints.txt "$(ls /wheels/*.whl)[$extras]"

# ------------------------------------------------------------------ the image
FROM python:${PYTHON}-slim-bookworm
ARG DEVICE=cpu
# Triton compiles launchers of its kernels where it runs
RUN if [ "$DEVICE" = gpu ]; then \
        apt-get update \
        && apt-get install -y --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi
# /data has the books and must outlive the container; /cache has what can be had again: checkpoints, compiled kernels
RUN useradd --uid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin quipu \
    && install -d -o quipu -g quipu -m 0700 /data /cache
COPY --from=install /opt/quipu /opt/quipu
ENV PATH=/opt/quipu/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface
USER 10001:10001
WORKDIR /cache
VOLUME ["/data", "/cache"]
EXPOSE 8000
# /health is 200 while a model loads; 503 for five minutes is a server that does not recover
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=30 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["quipu"]
CMD ["serve", "demo", "--host", "0.0.0.0", "--data-dir", "/data", "--shutdown-timeout", "60"]
