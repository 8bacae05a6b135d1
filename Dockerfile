# docker build -t omnikv .                              a CPU
# docker build -t omnikv --build-arg TORCH=cu130 .      a GPU (docker run --gpus all ...)
# docker run -p 8080:8080 -e OMNIKV_API_KEY=$KEY -v models:/home/omnikv omnikv
FROM python:3.11-slim
ARG TORCH=cpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home --uid 1000 omnikv
RUN pip install --no-cache-dir uv==0.13.9
COPY . /source
RUN uv pip install --system --no-cache --torch-backend=$TORCH "/source[serve,grammar,documents]"
USER 1000
WORKDIR /home/omnikv
EXPOSE 8080
ENTRYPOINT ["omnikv-serve", "--host", "0.0.0.0"]
