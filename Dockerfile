# One image for every role; TUTTI_* says what a container is (docker-compose.yml, docs/operating.md).
FROM python:3.11-slim AS build
RUN python -m venv /opt/tutti
ENV PATH=/opt/tutti/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# The same steps as `make setup`, for the same reasons: setuptools and the other packages by their digests, then torch
# alone. Its layer is large and is made anew only when hashes.txt changes. A CPU build is enough for this image;
# `--build-arg TORCH_INDEX=` with an index of CPU builds keeps it small.
COPY hashes.txt ./
RUN sed -n '/^setuptools==/,/[^\\]$/p' hashes.txt > setuptools.txt \
    && pip install --no-deps --require-hashes -r setuptools.txt \
    && pip install --no-deps --require-hashes --no-build-isolation -r hashes.txt
ARG TORCH_INDEX=
# The linter takes the index for a package without a version.
# hadolint ignore=DL3013
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==2.13.0"
COPY pyproject.toml README.md LICENSE ./
COPY cli.py tutti.py ./
COPY node ./node
COPY protos ./protos
RUN pip install --no-deps --no-build-isolation .

FROM python:3.11-slim
RUN groupadd --gid 10001 tutti \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /state --shell /usr/sbin/nologin tutti \
    && install -d -o 10001 -g 10001 -m 0700 /state /swarm
COPY --from=build /opt/tutti /opt/tutti
ENV PATH=/opt/tutti/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/state \
    TUTTI_HOME=/state \
    TUTTI_LISTEN=0.0.0.0 \
    TUTTI_P2P_PORT=31337 \
    TUTTI_GRPC_PORT=31338 \
    TUTTI_TRANSPORT_BYPASS_PORT=31339
USER 10001:10001
WORKDIR /state
VOLUME ["/state"]
EXPOSE 31337/tcp 31337/udp 31338/tcp 31339/tcp
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s --retries=4 CMD ["tutti", "status", "--plain"]
ENTRYPOINT ["tutti"]
CMD ["start"]
