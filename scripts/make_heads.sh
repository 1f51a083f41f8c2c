#!/usr/bin/env bash
# Trains the heads that come with the package, for SmolLM2-135M-Instruct, and puts them in place.
#
#   make heads DATA=answers.jsonl.gz     conversations whose answers are the model's own (several: DATA="a.jsonl b.jsonl")
#   make heads                           no data: the model writes prompts and answers itself, for the general heads only
#
# Both go on from the same first heads, the domain heads on the records whose `source` is DOMAIN_SOURCE.
# Every stage resumes: stop it and run it again. RUNS (default runs/) holds the stages, a few GB.
set -euo pipefail
cd "$(dirname "$0")/.."

DATA=${DATA:-}
RUNS=${RUNS:-runs}
DOMAIN_SOURCE=${DOMAIN_SOURCE:-gsm8k-train}
BASE=HuggingFaceTB/SmolLM2-135M-Instruct
MODEL=${MODEL:-$(python -c 'from medusa_spec.default_model import default_model_path; print(default_model_path())')}

# Weights are the same on every machine; trees are chosen by the times measured on this one.
REPORT=(--report-prompts 8 --report-new-tokens 128)
FAMILY=(--kind fused --num-heads 7)
GO_ON=("${FAMILY[@]}" --init-from "$RUNS/first/heads" --unroll 4 --epochs 1 --max-steps 270 --learning-rate 4e-4)

train() { # name, then options
    local name=$1
    shift
    python -m medusa_spec finetune --model "$MODEL" --base-name "$BASE" --output "$RUNS/$name" --seed 0 "${REPORT[@]}" "$@"
}

data() { # files; into DATA_ARGS
    DATA_ARGS=()
    for file in "$@"; do DATA_ARGS+=(--data "$file"); done
}

publish() { # name
    mkdir -p "medusa_spec/data/heads/$1" "docs/heads"
    cp "$RUNS/$1/heads/"{medusa_config.json,heads.safetensors,README.md} "medusa_spec/data/heads/$1/"
    cp "$RUNS/$1/report/report.json" "docs/heads/$1.json"
    cp "$RUNS/$1/report/report.md" "docs/heads/$1.md"
    for plot in "$RUNS/$1/report/"*.png; do
        [ -e "$plot" ] && cp "$plot" "docs/heads/$1-$(basename "$plot")"
    done
    sed -i "s|](\([a-z_]*\.png\))|]($1-\1)|g" "docs/heads/$1.md"
}

# First one step of a draft, then more of them; then a short training of all that are unrolled, on general and on domain
# answers apart.
# shellcheck disable=SC2086  # DATA may name several files
data ${DATA:-self}
train first "${DATA_ARGS[@]}" "${FAMILY[@]}" --unroll 3 --unroll-ramp 0.8 --epochs 2 --learning-rate 7e-4 \
    --tree-size 4 --stage self --stage data --stage states --stage train --stage calibrate
# shellcheck disable=SC2086
data ${DATA:-"$RUNS/first/self.jsonl"}
train smollm2-135m "${DATA_ARGS[@]}" --states-from "$RUNS/first" "${GO_ON[@]}" "$@"
publish smollm2-135m

if [ -n "$DATA" ]; then
    train smollm2-135m-gsm8k "${DATA_ARGS[@]}" --source "$DOMAIN_SOURCE" --states-from "$RUNS/first" "${GO_ON[@]}" "$@"
    publish smollm2-135m-gsm8k
fi
