#!/usr/bin/env bash
# Shows that heads of this project draft the same in vLLM as here: equal greedy tokens, equal counters.
#
#   scripts/engine_check.sh                      train small Medusa heads for the default model first (some minutes)
#   scripts/engine_check.sh HEADS [HEADS...]     these, of kinds that `medusa-spec export` takes
#
# vLLM gets an environment of its own in ENGINE (default .build/engine; 3.5 GB, a minute): its requirements do not agree
# with this project's. WORK (default .build/engine-check) holds exports and logs. PROCESSES="1 3": one run with the target in
# one process and one spread over three, as SmolLM2 has nine heads. ARGS goes to scripts/engine_check.py.
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/engine_environment.sh
WORK=${WORK:-.build/engine-check}
PROCESSES=${PROCESSES:-1 3}

make_engine

if [ $# -eq 0 ]; then
    MODEL=$("$PYTHON" -c 'from medusa_spec.default_model import default_model_path; print(default_model_path())')
    "$PYTHON" -m medusa_spec finetune --model "$MODEL" --data self --self-conversations 200 \
        --output "$WORK/medusa" --kind medusa --num-heads 4 --epochs 4 --report-prompts 2
    set -- "$WORK/medusa/heads"
fi

# shellcheck disable=SC2086  # words of PROCESSES and ARGS are arguments
"$PYTHON" scripts/engine_check.py "$@" --engine-python "$ENGINE/bin/python" --work "$WORK" --processes $PROCESSES ${ARGS:-}
