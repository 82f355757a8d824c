#!/usr/bin/env bash
# This program beside PyTorch (data/torch_moe.py) on the CPU: whole training steps of `--preset small`, by turns,
# tokens/s of each, and the ratio to PyTorch's best way. Some minutes a shape.
#
#     PYTHON=venv/bin/python data/peer.sh        a python with torch: pip install torch
#
# Settings: SHAPES ("experts,a token,width ..."), ROUNDS, THREADS, WAYS (flags of torch_moe.py, a comma between
# them), LIMIT (seconds that a run of PyTorch may take: compiling 64 experts a layer takes minutes; one that
# fails is not tried again), TRAIN (the program).
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
. data/measuring.sh
read -ra shapes <<<"${SHAPES:-8,2,512 64,8,128}"
read -ra ways <<<"${WAYS:-sorted sorted,--compile loop grouped}"
rounds=${ROUNDS:-5} threads=${THREADS:-$(nproc)} train=${TRAIN:-./train_moe} python=${PYTHON:-python3}

stop() { echo "peer: $*" >&2; exit 2; }
[ -x "$train" ] || stop "expected the program $train, found none: make"
"$python" -c 'import torch' 2>/dev/null || stop "expected a python with torch, $python has none: PYTHON=..."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rate_of() { median <"$1" | awk '{ printf "%.0f", $1 }'; }

echo "| experts, a token, width | this program, tokens/s | PyTorch $("$python" -c 'import torch; print(torch.__version__)'), tokens/s | ratio to the best |"
echo "|---|---|---|---|"
for shape in "${shapes[@]}"; do
    IFS=, read -r E K I <<<"$shape"
    for ((round = 0; round < rounds; round++)); do
        for way in "${ways[@]}"; do
            [ ! -e "$work/failed.$shape.$way" ] || continue
            "$train" bench --preset small --experts "$E" --topk "$K" --d-expert "$I" --threads "$threads" --json |
                tr ',' '\n' | field tok_per_s >>"$work/own.$shape"
            IFS=, read -ra flags <<<"$way"
            timeout "${LIMIT:-600}" "$python" data/torch_moe.py --experts "$E" --topk "$K" --d-expert "$I" --threads "$threads" --variant \
                "${flags[@]}" 2>"$work/err" | field tok_per_s >>"$work/$shape.$way" || {
                echo "peer: PyTorch fails: $shape $way: $(tail -n 1 "$work/err")" >&2
                : >"$work/failed.$shape.$way"
            }
        done
    done
    own=$(rate_of "$work/own.$shape") best=0 list=
    for way in "${ways[@]}"; do
        rate=
        [ -e "$work/failed.$shape.$way" ] || rate=$(rate_of "$work/$shape.$way")
        list+="${list:+; }${way/,--/, } ${rate:-fails}"
        [ "${rate:-0}" -le "$best" ] || best=$rate
    done
    echo "| ${shape//,/, } | $own | $list | $(awk -v a="$own" -v b="$best" 'BEGIN { print b ? sprintf("%.2f", a / b) : "-" }') |"
done
