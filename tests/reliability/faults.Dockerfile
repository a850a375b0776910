# What tests/reliability/containers.py runs its cases in: the project's image, with what some containers have and
# others lack. Those are in folders of their own, for PYTHONPATH.
ARG IMAGE=emtau_dask
FROM $IMAGE
USER root
# The project's environment has no pip of its own.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN /usr/local/bin/python3 -m pip --python "$(command -v python)" install "aiobotocore>=2.15.2" "s3fs>=2024.12.0" "moto[server]>=5.0.20"
RUN /usr/local/bin/python3 -m pip --python "$(command -v python)" uninstall -y numba llvmlite
RUN /usr/local/bin/python3 -m pip --python "$(command -v python)" install --no-deps --target /opt/numba numba llvmlite
RUN /usr/local/bin/python3 -m pip --python "$(command -v python)" install --no-deps --target /opt/numpy "numpy<2.4"
USER emtau
