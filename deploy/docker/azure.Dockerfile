# Onward on Azure Container for PyTorch, with its drivers, NCCL and network:
#   docker build --file deploy/docker/azure.Dockerfile --tag onward:0.1.0-azure .
# The base has Python 3.10; Onward needs 3.11, and gets an environment of its own beside it.
ARG BASE=mcr.microsoft.com/aifx/acpt/stable-ubuntu2204-cu126-py310-torch280:biweekly.202607.1

FROM ${BASE}
ENV PYTHONUNBUFFERED=1
RUN conda create --yes --prefix /opt/onward/env python=3.11.13 && conda clean --all --yes
ENV PATH=/opt/onward/env/bin:${PATH}
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
