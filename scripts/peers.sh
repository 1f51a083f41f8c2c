#!/usr/bin/env bash
# Speed of this project beside Hugging Face's generate and vLLM on a CPU: same weights, same prompts, one at a time.
#
#   scripts/peers.sh PROMPTS [--per-category N] [--max-new-tokens N] [--heads NAME] [--medusa-heads FOLDER] ...
#
# Prints tables and a line of JSON, and draws docs/peers.png; all arguments are those of benchmarks/peers.py (--help).
# vLLM gets an environment of its own in ENGINE (see scripts/engine_environment.sh); where it cannot be made or does not run,
# the rest is measured without it, and the tables say so. Its suffix decoding needs a package that is built from source,
# tried once. Close other programs: the last line says whether the machine was quiet.
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/engine_environment.sh
SUFFIX=arctic-inference==0.1.1
WORK=${WORK:-.build/peers}

mkdir -p "$WORK"
engine=()
if make_engine; then
    engine=(--engine-python "$ENGINE/bin/python")
    if [ ! -e "$ENGINE/.suffix" ]; then
        "$ENGINE/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$SUFFIX" \
            > "$WORK/suffix-build.log" 2>&1 || echo "$SUFFIX was not built, see $WORK/suffix-build.log" >&2
        touch "$ENGINE/.suffix"
    fi
else
    echo "no environment with vLLM could be made in $ENGINE: going on without it" >&2
fi

# Unset, so that the script finds its neighbours where that variable is in force.
env -u PYTHONSAFEPATH "$PYTHON" benchmarks/peers.py --plot docs/peers.png "${engine[@]}" --work "$WORK" "$@"
