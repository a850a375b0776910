# The image of every service in docker-compose.yml.
FROM python:3.11-slim
ENV PYTHONUNBUFFERED=1

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY emtau_dask emtau_dask
# bokeh draws the dashboard of the dask scheduler.
RUN pip install --no-cache-dir ".[parquet]" "bokeh>=3.1"

# A new volume that is mounted at /shared takes over the owner of this folder.
RUN useradd --create-home emtau && mkdir /shared && chown emtau:emtau /shared
COPY --chown=emtau:emtau configs /configs

USER emtau
WORKDIR /shared
CMD ["emtau", "--help"]
