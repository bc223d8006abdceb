# docker build -t megablocks-core . && docker run --rm megablocks-core make demo
FROM python:3.12-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /megablocks-core
COPY . .
RUN make .venv/.ready
CMD ["make", "test"]
