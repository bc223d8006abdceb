# This package beside TensorRT-LLM up to 1.2, for a machine with an NVIDIA GPU.
#
# IMAGE is a container that has tensorrt_llm: NVIDIA's release image of TensorRT-LLM 1.2.1.
#
#   docker build -f docker/trtllm.Dockerfile --build-arg IMAGE=... -t megablocks-trtllm .
#   docker run --gpus all -v "$PWD/models:/models" megablocks-trtllm \
#       megablocks-export engine /models/checkpoint /models/engine
ARG IMAGE
FROM ${IMAGE}
WORKDIR /megablocks-core
COPY . .
# The image's torch stays as it is; without the extension its NumPy twins work.
RUN pip install --no-cache-dir scikit-build-core nanobind xxhash safetensors \
    && pip install --no-cache-dir --no-deps --no-build-isolation .
CMD ["megablocks-export", "--help"]
