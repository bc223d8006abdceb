#!/usr/bin/env bash
# Builds the pinned environment of one oracle under .oracles/NAME, this package in it.
# Usage: tools/oracles.sh transformers|megatron|mamba|modelopt|transformer-engine|streaming|serving
# The last line of its output is that environment's python; everything else goes to stderr.
set -euo pipefail
cd "$(dirname "$0")/.."

name=${1-}
case $name in
transformers | megatron | mamba | modelopt | transformer-engine | streaming | serving) ;;
*)
    names="transformers, megatron, mamba, modelopt, transformer-engine, streaming or serving"
    echo "NAME=$name must be $names" >&2
    exit 2
    ;;
esac
env=$PWD/.oracles/$name
python=$env/bin/python
export MEGABLOCKS_REQUIRE_NATIVE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Each oracle is installed without its dependencies, which would replace the pinned torch.
install() { "$python" -m pip install -q -c "$env/constraints.txt" "$@"; }

# Shows this environment what .venv holds, behind all that is installed here: neither torch nor the
# extension is made again. Only where .venv is ready, of the same Python, and of the same pins.
see_venv() {
    local version='import sys; print(sys.version)' ours theirs
    local packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    ours=$("$python" -c "$packages")
    rm -f "$ours/venv.pth"
    cmp -s constraints.txt "$env/constraints.txt" || return 1
    [ -e .venv/.ready ] && [ -z "$(find "${made_of[@]}" -newer .venv/.ready)" ] || return 1
    [ "$(.venv/bin/python -c "$version")" = "$("$python" -c "$version")" ] || return 1
    theirs=$(.venv/bin/python -c "$packages")
    echo "import site; site.addsitedir('$theirs')" >"$ours/venv.pth"
}

build() {
    [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$env"
    cp constraints.txt "$env/constraints.txt"
    if [ "$name" = modelopt ]; then  # it reads Mixtral as transformers 4 lays it out
        sed -i.bak -E '/^(transformers|huggingface_hub|tokenizers)==/d' "$env/constraints.txt"
        echo transformers==4.57.6 >>"$env/constraints.txt"
    fi
    if [ "$name" = streaming ]; then  # its libraries want an older NumPy and dateutil
        sed -i.bak -E '/^(numpy|python-dateutil)==/d' "$env/constraints.txt"
        echo numpy==2.1.3 >>"$env/constraints.txt"
    fi
    if ! see_venv; then
        install scikit-build-core nanobind cmake ninja
        install --no-build-isolation -e .
    fi
    install setuptools
    install hypothesis packaging pytest pytest-timeout transformers

    case $name in
    megatron)
        install triton==3.9.0 einops==0.8.2 psutil==7.2.2
        install --no-deps --ignore-requires-python megatron-core==0.19.2
        install grain==0.2.18  # for benchmarks
        # Read as text, to see that docs/moe.md names every field of theirs.
        "$python" -m pip download -q --no-deps --no-build-isolation -d "$env/sources" \
            megablocks==0.10.0 torchtitan==0.3.0
        ;;
    mamba)  # with causal-conv1d: plain references and signatures, nothing of CUDA is built
        install triton==3.9.0 einops==0.8.2 setuptools wheel
        MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE \
            CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE \
            install --no-deps --no-build-isolation mamba-ssm==2.3.2.post1 causal-conv1d==1.7.0
        install --no-deps fla-core==0.6.0  # flash-linear-attention's functions
        ;;
    modelopt)
        install nvidia-ml-py==13.615.71 omegaconf==2.4.0 pulp==3.3.2 pydantic regex rich \
            scipy==1.17.1 requests==2.34.2
        install --no-deps nvidia-modelopt==0.47.0
        ;;
    transformer-engine)  # with flash-attn: for signatures alone, nothing of CUDA is built
        install einops==0.8.2 onnx==1.23.2 onnxscript==0.7.2 importlib-metadata==10.2.0 pydantic \
            setuptools triton==3.9.0 wheel
        install --no-deps transformer-engine==2.20.2 torchao==0.18.0
        FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE \
            install --no-deps --no-build-isolation flash-attn==2.8.3.post2
        ;;
    streaming)  # for benchmarks, and to read and write what is converted: with Hugging Face datasets
        install boto3==1.44.8 brotli==1.2.1 catalogue==2.0.10 lightning-utilities==0.15.3 \
            pillow==13.0.0 python-snappy==0.7.3 requests==2.34.2 tqdm==4.70.1 zstd==1.5.7.2
        install --no-deps mosaicml-streaming==0.13.0 litdata==0.2.76
        install dill==0.4.1 multiprocess==0.70.19 pandas==2.3.3 pyarrow zstandard
        install --no-deps datasets==5.2.0
        ;;
    serving)  # read as text, to see that they know the names that are written; nothing is built
        install setuptools setuptools-rust setuptools-scm packaging jinja2 cmake ninja
        "$python" -m pip download -q --no-deps -d "$env/serving" sglang==0.5.23
        VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.34.0 "$python" -m pip download -q \
            --no-deps --no-build-isolation --no-binary vllm -d "$env/serving" vllm==0.34.0
        ;;
    esac
    touch "$env/.ready"
}

made_of=(constraints.txt pyproject.toml CMakeLists.txt cpp)
inputs=("${made_of[@]}" tools/oracles.sh)
if [ ! -e "$env/.ready" ] || [ -n "$(find "${inputs[@]}" -newer "$env/.ready")" ]; then
    build >&2
fi
echo "$python"
