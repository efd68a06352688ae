# Onward on a CPU:  docker build --file deploy/docker/cpu.Dockerfile --tag onward:0.1.0-cpu .
# The kernels are compiled in a stage of its own, so that the image holds no compiler.
ARG PYTHON=3.11.13

FROM python:${PYTHON}-bookworm AS build
WORKDIR /build
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE constraints.txt ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --constraint constraints.txt --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm
ENV PYTHONUNBUFFERED=1
# From the layer that changes least to the one that changes most.
COPY constraints.txt /opt/onward/
RUN pip install --no-cache-dir torch --constraint /opt/onward/constraints.txt \
    --index-url https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --find-links /wheels "onward[hf,ort]" \
    --constraint /opt/onward/constraints.txt
COPY --chmod=0755 deploy/launch.sh deploy/processes.py /opt/onward/
RUN useradd --create-home --uid 1000 onward
USER 1000
WORKDIR /home/onward
ENTRYPOINT ["/opt/onward/launch.sh"]
CMD ["doctor"]
