# The image of every service in docker-compose.yml.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
LABEL emtau.stage=build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN python3 -m venv --without-pip /opt/emtau
# What the project needs comes first: this layer is kept until pyproject.toml changes.
# bokeh draws the dashboard of the dask scheduler. Tests of other projects stay out.
ARG EXTRAS=parquet
COPY pyproject.toml ./
RUN python3 -c 'import sys, tomllib; \
    project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    extras = [line for name in sys.argv[1].split(",") if name for line in project["optional-dependencies"][name]]; \
    print(*project["dependencies"], *extras, "bokeh>=3.1", sep="\n")' "$EXTRAS" > needs.txt \
    && python3 -m pip --python /opt/emtau/bin/python install -r needs.txt \
    && find /opt/emtau/lib/python3*/site-packages -type d -name tests -prune -exec rm -r {} +
COPY README.md LICENSE ./
COPY emtau_dask emtau_dask
RUN python3 -m pip --python /opt/emtau/bin/python install --no-deps .

FROM ${BASE}
LABEL org.opencontainers.image.title="emtau_dask" \
    org.opencontainers.image.description="Fit Gaussian mixtures to files of any size, with scikit-learn's API" \
    org.opencontainers.image.licenses="BSD-3-Clause"
# A new volume that is mounted at one of these folders takes over its owner.
RUN useradd --uid 10001 --user-group --create-home emtau \
    && mkdir -m 700 /certificates && mkdir /shared && chown emtau:emtau /certificates /shared
ENV PATH=/opt/emtau/bin:$PATH PYTHONUNBUFFERED=1
USER emtau
WORKDIR /shared
CMD ["emtau", "--help"]
COPY configs /configs
COPY containers /
COPY --from=build /opt/emtau /opt/emtau
