#!/usr/bin/env bash
# --device and --dtype: who refuses them and how; and what a device must do in whole runs, as a model
# of model.h against the CPU: the same text, losses close to the CPU's, the same bits in two runs and in
# a resumed one, checkpoints that any device reads. The device is the emulated one, in the program that
# `make emulated` builds (EMULATED names it; without a C++ compiler there is none); DEVICE=cuda runs the
# same on a GPU with TRAIN.
. "$(dirname "$0")/testing.sh"

device=${DEVICE:-emulated}
[ "$device" = cuda ] && program=$TRAIN || program=${EMULATED:-}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}

text 300 >"$work/text"
text 60 5 >"$work/other"
# A switch between fibers costs much and a model little: small, but off every tile.
tiny=(--layers 2 --d-model 24 --heads 3 --kv-heads 1 --head-dim 8 --experts 4 --topk 2 --d-expert 20
    --seq 12 --batch 2 --warmup 1 --eval-batches 2 --sample-every 0)
cpu() { run 0 "$TRAIN" --input "$work/text" "${tiny[@]}" "$@"; }
on() { run 0 "$program" --input "$work/text" "${tiny[@]}" --device "$device" "$@"; }
losses() { sed -nE 's/.*"loss":([0-9.e+-]+),.*/\1/p' "$1/metrics.jsonl"; }
# Every line of A and B, two columns of numbers, within a part of each other.
near() { # A B PART
    paste "$1" "$2" | awk -v part="$3" '{ d = $1 / $2 - 1; if (!(d < part && d > -part)) bad = 1 }
        END { exit bad || !NR }' || no "$1 and $2 differ: $(paste -sd ' ' "$1"), $(paste -sd ' ' "$2")"
}

# ---- refusals ------------------------------------------------------------------------------------
# By every command, before it looks at anything else.
refusals() {
    local c flags pattern
    cpu --steps 1 --out o
    contents o >before
    for c in "train ${tiny[*]} --input $work/text --out p" 'generate --model o' \
        "eval --model o --input $work/text" 'info --preset tiny' 'info o' \
        'bench --layers 1 --d-model 16 --heads 2 --seq 16'; do
        # no GPU, or a build without CUDA: either says so
        run 2 env CUDA_VISIBLE_DEVICES= "$TRAIN" $c --device cuda
        refused '--device cuda: expected .*found' '--device cpu'
        run 2 env CUDA_VISIBLE_DEVICES= "$TRAIN" $c --device cuda --dtype bf16
        refused '--device cuda: expected .*found'
        run 2 "$TRAIN" $c --device emulated
        refused '--device emulated: expected .*found.*make emulated'
        run 2 "$TRAIN" $c --dtype bf16
        refused '--dtype bf16: expected --device cuda or emulated, found cpu'
        run 2 "$TRAIN" $c --dtype fp16
        refused '--dtype: expected one of fp32\|bf16, found .fp16'
    done
    run 2 env CUDA_VISIBLE_DEVICES= "$TRAIN" --resume o --steps 2 --device cuda
    refused '--device cuda: expected .*found'
    run 2 "$TRAIN" --resume o --steps 2 --dtype bf16
    refused "--dtype cannot change .* was 'fp32', found 'bf16'"
    run 2 "$TRAIN" tokenize --input "$work/text" --out p --device cpu
    refused '--device is not a flag of tokenize'
    [ ! -e p ] || no "a refused run made its folder"
    contents o >after
    diff <(grep -v '/\.lock \|^\. ' before) <(grep -v '/\.lock \|^\. ' after) || no "a refused run changed o"
}
named_first() {
    cpu --steps 1 --out o
    [ "$(head -n 1 stdout)" = 'device: cpu, fp32' ] || no "training begins with $(head -n 1 stdout)"
    run 0 "$TRAIN" --resume o --steps 2
    [ "$(head -n 1 stdout)" = 'device: cpu, fp32' ] || no "a resumed run begins with $(head -n 1 stdout)"
    run 0 "$TRAIN" info o
    head -n 1 stdout | grep -qx 'device  *cpu, fp32' || no "info begins with $(head -n 1 stdout)"
    ! grep -q 'weight copies' stdout || no "the CPU has copies of its weights"
    run 0 "$TRAIN" bench "${tiny[@]:0:20}"
    head -n 1 stdout | grep -qx 'device  *cpu, fp32, [0-9]* threads' ||
        no "bench begins with $(head -n 1 stdout)"
    said '^operation on cpu, fp32 ' stdout
    said '^step .* on cpu, fp32\)$' stdout
}
if [ "$device" != cuda ]; then
    check devices/refused refusals
    check devices/named_first named_first
    [ "$program" ] || { echo "skip devices/emulated: no C++ compiler here"; exit 0; }
fi

# ---- whole runs ----------------------------------------------------------------------------------
training() { # DTYPE, how far a loss may be off
    local batch
    cpu --steps 4 --eval-every 2 --out cpu
    on --steps 4 --eval-every 2 --dtype "$1" --out o
    [ "$(head -n 1 stdout)" = "device: $device, $1" ] || no "training begins with $(head -n 1 stdout)"
    losses cpu >cpu.loss
    losses o >o.loss
    near cpu.loss o.loss "$2"
    [ "$1" = fp32 ] || ! cmp -s cpu.loss o.loss || no "bf16 has the losses of fp32"
    on --steps 4 --eval-every 2 --dtype "$1" --out again
    same_run o again
    # a checkpoint is of no device and of no type: weights in fp32, as the CPU writes and reads them
    same cpu/latest/config.json o/latest/config.json
    [ "$(wc -c <cpu/latest/model.safetensors)" = "$(wc -c <o/latest/model.safetensors)" ] ||
        no "model.safetensors has another size"
    grep -q "\"device\": \"$device\"" o/latest/trainer.json || no "no device in trainer.json"
    grep -q "\"dtype\": \"$1\"" o/latest/trainer.json || no "no dtype in trainer.json"
    run 0 "$TRAIN" eval --model o --input "$work/other" --eval-batches 2
    cut -d ' ' -f 2 stdout >cpu.loss
    for batch in 1 2 3; do # the same rows, alone or beside others, to every digit
        run 0 "$program" eval --model o --input "$work/other" --batch $batch \
            --eval-batches $((6 / batch)) --device "$device" --dtype "$1"
        cut -d ' ' -f 2 stdout >"loss.$batch"
        same loss.1 "loss.$batch"
    done
    run 0 "$TRAIN" eval --model o --input "$work/other" --batch 1 --eval-batches 6
    cut -d ' ' -f 2 stdout >cpu.loss
    near cpu.loss loss.1 "$2"
}
resuming() { # DTYPE
    on --steps 4 --schedule constant --save-every 2 --eval-every 2 --dtype "$1" --out full
    on --steps 2 --schedule constant --save-every 2 --eval-every 2 --dtype "$1" --out o
    run 0 "$program" --resume o --steps 4 # the device and the type are those of the run
    [ "$(head -n 1 stdout)" = "device: $device, $1" ] || no "resumed with $(head -n 1 stdout)"
    same_run full o
    run 0 "$program" info o
    head -n 1 stdout | grep -qx 'device  *cpu, fp32' || no "info begins with $(head -n 1 stdout)"
    if [ "$1" = fp32 ]; then # the device may be given anew
        run 0 "$program" --resume o --steps 5 --device cpu
        [ "$(head -n 1 stdout)" = 'device: cpu, fp32' ] || no "went on with $(head -n 1 stdout)"
        grep -q '"device": "cpu"' o/latest/trainer.json || no "the new device is not kept"
    else
        run 2 "$program" --resume o --steps 5 --device cpu
        refused '--dtype bf16: expected --device cuda or emulated, found cpu'
        run 2 "$program" --resume o --steps 5 --dtype fp32
        refused "--dtype cannot change .* was 'bf16', found 'fp32'"
    fi
}
generating() { # DTYPE
    local n prompt
    cpu --steps 60 --lr 0.01 --eval-every 0 --out o
    run 0 "$TRAIN" generate --model o --tokens 12 --temperature 0 --prompt 'the king'
    cp stdout cpu.text
    run 0 "$program" generate --model o --tokens 12 --temperature 0 --prompt 'the king' \
        --device "$device" --dtype "$1"
    cp stdout first
    [ "$(head -c 8 first)" = 'the king' ] && [ "$(wc -c <first)" = 21 ] || no "generated $(cat first)"
    [ "$1" = bf16 ] || same cpu.text first # no two tokens are that close
    # with the cache or fed as a prompt, the same bits
    for n in 9 12; do
        prompt=$(head -c $n first; echo .)
        run 0 "$program" generate --model o --tokens $((20 - n)) --temperature 0 \
            --prompt "${prompt%.}" --device "$device" --dtype "$1"
        same first stdout "prompt of $n bytes:"
    done
}
# What info counts, before anything is allocated; model_build takes as much (table/memory of test_moe).
memory() {
    run 0 "$program" info "${tiny[@]:0:20}" --device "$device" --dtype fp32
    head -n 1 stdout | grep -qx "device  *$device, fp32" || no "info begins with $(head -n 1 stdout)"
    ! grep -q 'weight copies' stdout || no "copies of the weights in fp32"
    cp stdout fp32
    run 0 "$program" info "${tiny[@]:0:20}" --device "$device" --dtype bf16
    head -n 1 stdout | grep -qx "device  *$device, bf16" || no "info begins with $(head -n 1 stdout)"
    awk '
        FNR == 1 { f++ }
        /^  parameters /        { params[f] = $2 }
        /^  weight copies /     { copies[f] = $3 }
        /^  saved activations / { saved[f] = $3 }
        /^  optimiser moments / { moments[f] = $3 }
        /^  total /             { total[f] = $2 }
        /^  [a-z]/              { all[f] += $(NF - 1) }
        function close_to(a, b) { return a - b < 0.002 && b - a < 0.002 }
        END {
            exit !(params[1] == params[2] && moments[1] == moments[2] && params[2] > 0 &&
                close_to(2 * copies[2], params[2]) && saved[2] < 0.75 * saved[1] &&
                close_to(all[1], 2 * total[1]) && close_to(all[2], 2 * total[2]))
        }' fp32 stdout || no "the account is $(grep '^  [a-z]' stdout | tr -s ' ' | paste -sd ';')"
}
# A value that is not finite is found in the weights, else in activations of either type.
not_finite() { # DTYPE
    local file at begin end
    cpu --steps 1 --out o
    file=$(cd o/latest && pwd -P)/model.safetensors
    at=$(tensor_at "$file" model.layers.1.self_attn.v_proj.weight) || no "$at"
    read -r begin end <<<"$at"
    # 0x7f7f7f7f is 3.4e38: finite, also when it is rounded, and too large to be added up
    head -c $((end - begin)) /dev/zero | tr '\0' '\177' |
        dd of="$file" bs=4k oflag=seek_bytes seek="$begin" conv=notrunc status=none
    run 1 "$program" --input "$work/text" --init o/latest --batch 2 --steps 1 --out p \
        --device "$device" --dtype "$1"
    refused 'step 1: ' 'the first such value is in the q, k, v of layer 1'
    at=$(tensor_at "$file" model.norm.weight) || no "$at"
    printf '\377\377\377\377' | dd of="$file" bs=1 seek="${at% *}" conv=notrunc status=none
    run 1 "$program" eval --model o/latest --input "$work/text" --eval-batches 1 --device "$device" \
        --dtype "$1"
    refused 'model.norm.weight holds a value that is not finite'
}
benching() {
    run 0 "$program" bench "${tiny[@]:0:20}" --device "$device" --dtype bf16
    head -n 1 stdout | grep -qx "device  *$device, bf16, [0-9]* threads" ||
        no "bench begins with $(head -n 1 stdout)"
    said "^operation on $device, bf16 " stdout
    said 'independent bf16 multiply-adds' stdout
    said "^step .* on $device, bf16\)$" stdout
    ! grep -qE '\b(nan|inf)\b| -[0-9]' stdout || no "found $(grep -m 1 -E '\b(nan|inf)\b| -[0-9]' stdout)"
    [ "$device" = cuda ] || said 'not how fast'
}
for dtype in fp32 bf16; do
    [ $dtype = fp32 ] && part=1e-4 || part=2e-2
    check "devices/$device/training_$dtype" training $dtype $part
    check "devices/$device/resuming_$dtype" resuming $dtype
    check "devices/$device/generating_$dtype" generating $dtype
    check "devices/$device/not_finite_$dtype" not_finite $dtype
done
check "devices/$device/memory" memory
check "devices/$device/bench" benching
