# Onward on NVIDIA GPUs:  docker build --file deploy/docker/cuda.Dockerfile --tag onward:0.1.0-cuda .
# PyTorch's wheels bring CUDA; the driver comes from the host (docker run --gpus all).
# Triton compiles a launcher with a C compiler when a kernel is first used, so that this image has one.
ARG PYTHON=3.11.13

FROM python:${PYTHON}-bookworm
ENV PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# From the layer that changes least to the one that changes most.
COPY constraints.txt /opt/onward/
RUN pip install --no-cache-dir torch triton --constraint /opt/onward/constraints.txt
WORKDIR /build
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir ".[hf,ort,gpu]" --constraint /opt/onward/constraints.txt
COPY --chmod=0755 deploy/launch.sh deploy/processes.py /opt/onward/
RUN useradd --create-home --uid 1000 onward
USER 1000
WORKDIR /home/onward
ENTRYPOINT ["/opt/onward/launch.sh"]
CMD ["doctor"]
