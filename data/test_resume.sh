#!/usr/bin/env bash
# An interrupted run that is resumed ends as one that was not: the same weights, moments and log,
# byte for byte. And what --resume, --overwrite and --keep do with the folder of a run.
. "$(dirname "$0")/testing.sh"

model=(--layers 2 --d-model 32 --heads 2 --kv-heads 1 --experts 4 --topk 2 --d-expert 32)
data=(--input "$work/text" --seq 32 --batch 4)
# Checkpoints at 5, 10, 15, 20, and at 3, 6 ... when they are the best so far.
often=(--save-every 5 --eval-every 3 --eval-batches 8 --keep 0 --warmup 3 --log-every 1)
text 900 >"$work/text"

train() { run 0 "$TRAIN" "${model[@]}" "${data[@]}" "${often[@]}" "$@"; }

# The folder $2 as it was when the run in $1 had saved step $3 and died: the log is ahead.
cut_at() {
    local step link=latest
    cp -a "$1" "$2"
    for step in "$2"/step_*; do
        [ "$((10#${step##*_}))" -le "$3" ] || rm -r "$step"
    done
    for link in latest best; do
        [ -e "$2/$link" ] && continue
        ln -sfn "$(cd "$2" && ls -d step_* | tail -n 1)" "$2/$link"
    done
}

# ---- the same bytes ------------------------------------------------------------------------------
# 20 steps; and from the checkpoint of step 10 with another number of threads, other intervals.
halves() {
    train --out full --steps 20 --threads 1 "$@"
    steps_logged full 20
    complete full/latest
    cut_at full half 10
    run 0 "$TRAIN" --resume half --threads 3 --sample-every 7
    said '^resumed at step 10 of 20' stdout
    same_run full half
    steps_logged half 20
}
check resume/moe halves
check resume/accumulation halves --total-batch 256
check resume/sgd halves --optimizer sgd --lr 0.5
check resume/dense halves --experts 1 --topk 1
check resume/no_clipping_no_decay halves --grad-clip 0 --weight-decay 0
check resume/linear_tied_all_experts halves --schedule linear --tied 1 --topk 4
check resume/wsd_recompute halves --schedule wsd --recompute 2 --norm-topk 0
# Every pair of options of the model meets in one of these (test_options.h has the same table).
while read -r n flags; do
    check "resume/options_$n" halves $flags
done <<'END'
0 --qk-norm head --router softmax --norm-topk 1 --tied 1 --routing round --tile 8 --recompute 1 --topk 1
1 --qk-norm full --router sigmoid --norm-topk 0 --d-shared 8 --dense-layers 1 --routing round --tile 8 --topk 4 --aux-loss 0
2 --qk-norm none --router sigmoid --norm-topk 1 --dense-layers 1 --capacity 0.7 --recompute 2 --topk 2
3 --qk-norm none --router softmax --norm-topk 0 --tied 1 --topk 2 --aux-loss 0
4 --qk-norm head --router sigmoid --norm-topk 0 --d-shared 8 --dense-layers 1 --recompute 1 --topk 1
5 --qk-norm head --router softmax --norm-topk 1 --d-shared 8 --tied 1 --capacity 0.7 --recompute 2 --topk 4 --aux-loss 0
6 --qk-norm full --router softmax --norm-topk 1 --dense-layers 1 --tied 1 --capacity 0.7 --topk 1
7 --qk-norm full --router sigmoid --norm-topk 0 --d-shared 8 --capacity 0.7 --recompute 1 --topk 2 --aux-loss 0
8 --qk-norm full --router softmax --norm-topk 1 --recompute 2 --topk 4
9 --qk-norm none --router sigmoid --norm-topk 0 --d-shared 8 --dense-layers 1 --tied 1 --routing round --tile 8 --recompute 2 --topk 1 --aux-loss 0
10 --qk-norm none --router softmax --norm-topk 0 --d-shared 8 --dense-layers 1 --routing round --tile 8 --recompute 1 --topk 4
11 --qk-norm head --router sigmoid --norm-topk 0 --d-shared 8 --routing round --tile 8 --topk 2 --aux-loss 0
12 --qk-norm head --router sigmoid --norm-topk 1 --routing round --tile 8 --topk 2 --aux-loss 0
END
check resume/two_texts_batch_1 halves --input "$root/Makefile" --batch 1 --total-batch 96 --seed 9

# Shards of both kinds beside each other, shuffled together; the checkpoint of step 10 lies in the
# middle of the third epoch.
shards() {
    train --steps 1 --out bytes --eval-every 0 # for its vocabulary of bytes
    text 60 >first
    text 50 5 >second
    run 0 "$TRAIN" tokenize --vocab bytes/latest/tokenizer.json --input first --input second \
        --out tokens --shard-tokens 1500
    [ "$(ls tokens/*.bin | wc -l)" -gt 2 ] || no "shards: $(ls tokens)"
    data=(--input 'tokens/*.bin' --input "$work/short.txt" --seq 32 --batch 8)
    head -n 20 "$work/text" >"$work/short.txt"
    train --out full --steps 20 --threads 1
    [ "$(sed -n 's/.*"train_tokens": \([0-9]*\).*/\1/p' full/latest/trainer.json)" -lt 5000 ] ||
        no "20 steps of 256 tokens are not several epochs"
    cut_at full half 10
    run 0 "$TRAIN" --resume half --threads 3
    same_run full half
}
check resume/shards shards

# Three processes, a number of threads each, none of which knows that it will be interrupted.
thread_counts() {
    local t
    text 900 >text
    train --out 1 --steps 20 --schedule constant --threads 1
    for t in 2 3 8; do
        train --out $t --steps 10 --schedule constant --threads $t
        run 0 "$TRAIN" --resume $t --steps 13 --threads $((11 - t))
        run 0 "$TRAIN" --resume $t --steps 20 --threads 1
        ! grep . stderr || no "a constant schedule needs no warning: $(cat stderr)"
        # a last step is validated whenever --eval-every is on: compare without these lines' loss
        log 1 | sed -E 's/,"val_loss":[^,}]*//' >one
        log $t | sed -E 's/,"val_loss":[^,}]*//' >other
        same one other "--threads $t:"
        same 1/latest/model.safetensors $t/latest/model.safetensors
        same 1/latest/optimizer.safetensors $t/latest/optimizer.safetensors
    done
}
check resume/threads_1_2_3_8 thread_counts

# ---- signals -------------------------------------------------------------------------------------
# Steps that take longer than their checkpoint, so that the signal falls into one; each of them is
# validated, so that it has a validation loss to lose.
signalled() {
    local signal=$1 long=(--steps 12 --eval-every 1 --eval-batches 1 --total-batch "$2") n
    train --out full "${long[@]}"
    "$TRAIN" "${model[@]}" "${data[@]}" "${often[@]}" "${long[@]}" --out part >first 2>first.err &
    wait_for 60 grep -qs '^step  *3/' first
    sleep 0.1
    kill -s "$signal" $!
    wait $! || no "exit status $? after SIG$signal: $(cat first.err)"
    n=$(sed -n 's/^stopped at step \([0-9]*\) .*train_moe --resume part$/\1/p' first)
    [ "$n" ] || no "does not say how to resume: $(tail -n 1 first)"
    complete part/"$(printf 'step_%08d' "$n")"
    [ "$(readlink part/latest)" = "$(printf 'step_%08d' "$n")" ] || no "latest is not step $n"
    steps_logged part "$n"
    run 0 "$TRAIN" --resume part
    said "^resumed at step $n of 12" stdout
    same_run full part
    steps_logged part 12
}
check resume/SIGINT signalled INT 2048
check resume/SIGTERM signalled TERM 4096

# ---- folders -------------------------------------------------------------------------------------
finished() {
    train --out o --steps 6
    contents o | grep -v '\.lock' >before
    run 0 "$TRAIN" --resume o
    contents o | grep -v '\.lock' >after
    sed -E '/metrics.jsonl|^\. /s/ [0-9.]+ / /' before >a
    sed -E '/metrics.jsonl|^\. /s/ [0-9.]+ / /' after >b
    same a b "resumed at the last step:"
}
check resume/finished_run_is_left_alone finished

# The last line of a finished run is lost, with its validation loss: made again.
last_line_lost() {
    train --out full --steps 6
    cp -a full o
    sed -i '$d' o/metrics.jsonl
    rm -f o/best
    ln -s "$(cd o && ls -d step_* | head -n 1)" o/best
    run 0 "$TRAIN" --resume o
    same_run full o
}
check resume/last_line_lost last_line_lost

# Killed between the line of a step, its checkpoint, and the link `best`.
best_not_marked() {
    train --out full --steps 20 --eval-every 5
    [ "$(readlink full/best)" = step_00000020 ] || no "this text should get better all the time"
    cut_at full o 10
    ln -sfn step_00000005 o/best
    run 0 "$TRAIN" --resume o --steps 10
    [ "$(readlink o/best)" = step_00000010 ] || no "best is $(readlink o/best), step 10 was better"
}
check resume/best_not_marked best_not_marked

no_optimizer() {
    train --out o --steps 5
    rm o/step_0000000[1-4] -rf
    rm o/step_00000005/optimizer.safetensors
    contents o >before
    run 2 "$TRAIN" --resume o --steps 6
    refused optimizer.safetensors --init
    contents o | grep -v -e '^\. ' -e lock >after
    grep -v -e '^\. ' -e lock before >before2
    same before2 after
    run 0 "$TRAIN" --init o/step_00000005 "${data[@]}" --steps 2 --out new
    train --out p --steps 10 --schedule constant
    rm p/step_00000005/optimizer.safetensors
    run 2 "$TRAIN" --resume p/step_00000005
    refused optimizer.safetensors --init
}
check resume/without_moments no_optimizer

# The newest checkpoint is damaged: said, and the one before it leads to the same end.
damaged() {
    local how
    train --out full --steps 20
    for how in \
        'truncate -s -1 o/step_00000015/model.safetensors' \
        'truncate -s 0 o/step_00000015/model.safetensors' \
        'truncate -s 5000 o/step_00000015/optimizer.safetensors' \
        'cp text o/step_00000015/trainer.json' \
        'cp o/step_00000010/trainer.json o/step_00000015/' \
        'cp text o/step_00000015/config.json' \
        'rm o/step_00000015/trainer.json' \
        'rm o/step_00000015/optimizer.safetensors'; do
        cp "$work/text" text
        rm -rf o
        cut_at full o 15
        $how
        run 0 "$TRAIN" --resume o
        said 'warning: .*step_00000015.*falling back'
        grep -qE '^resumed at step 1[0-4] of 20' stdout || no "$how: $(grep resumed stdout)"
        same_run full o
        steps_logged o 20
    done
    for how in o/step_*/model.safetensors; do cp text "$how"; done
    run 2 "$TRAIN" --resume o --steps 21
    said 'error: .*model.safetensors'
}
check resume/damaged_newest damaged

# Resumed from a step before the newest: the later lines go, the later checkpoints are replaced.
from_the_middle() {
    train --out full --steps 20
    cp -a full o
    truncate -s 100 o/step_00000015/model.safetensors
    run 0 "$TRAIN" --resume o/step_00000010
    same_run full o
    steps_logged o 20
    same full/step_00000015/model.safetensors o/step_00000015/model.safetensors
    run 2 "$TRAIN" --resume o/step_00000011
    refused o/step_00000011
}
check resume/from_the_middle from_the_middle

torn_log() {
    train --out full --steps 20
    cut_at full o 10
    head -c -40 o/metrics.jsonl >m && mv m o/metrics.jsonl
    run 0 "$TRAIN" --resume o
    same_run full o
    # a crash of the machine can leave zeros at the end of a file
    rm -r o && cut_at full o 10
    { head -n 11 full/metrics.jsonl; head -c 300 /dev/zero; } >o/metrics.jsonl
    run 0 "$TRAIN" --resume o
    same_run full o
}
check resume/torn_log torn_log

flags() {
    local flag
    train --out o --steps 6 --save-every 3
    contents o | grep -v lock >before
    for flag in --lr=0.001 --batch=8 --seq=16 --d-model=64 --seed=2 --optimizer=sgd \
        --schedule=linear \
        --min-lr=0 --warmup=9 --grad-clip=2 --aux-loss=0 --total-batch=256 --val-fraction=0.2 \
        --experts=8 --topk=1 --weight-decay=0 --beta2=0.9 --input=/dev/null; do
        run 2 "$TRAIN" --resume o --steps 7 $flag
        refused "${flag%%=*}.* cannot change" --init
    done
    contents o | grep -v lock >after
    same before after
    run 0 "$TRAIN" --resume o --lr 0.005 --input "$work/text" --batch 4 # as it was
    for flag in --overwrite --init=o/latest; do
        run 2 "$TRAIN" --resume o $flag
        refused --resume "${flag%%=*}"
    done
    run 0 "$TRAIN" --resume o --steps 8
    said 'warning: --steps 8: .*planned for 6 steps'
    [ "$(readlink o/latest)" = step_00000008 ] || no "not extended"
    run 2 "$TRAIN" --resume nowhere
    refused nowhere
    mkdir empty
    run 2 "$TRAIN" --resume empty
    refused empty
    run 2 "$TRAIN" --resume "$work/text"
    refused 'a text file'
    run 2 "$TRAIN" --resume # no out/ here
    refused 'no run found'
}
check resume/flags flags

changed_data() {
    text 900 >mine
    run 0 "$TRAIN" "${model[@]}" --input mine --seq 32 --batch 4 --steps 4 --save-every 2 --out o
    text 900 8 >mine
    cut_at o p 2
    run 0 "$TRAIN" --resume p
    said 'warning: the data '
    rm mine
    rm -r p && cut_at o p 2
    run 2 "$TRAIN" --resume p
    refused mine
}
check resume/changed_data changed_data

# Moved elsewhere as a whole, resumed from another folder and by a link to it.
moved() {
    train --out full --steps 20
    mkdir there && cut_at full there/o 10
    ln -s there link
    run 0 "$TRAIN" --resume link/o/
    same_run full there/o
}
check resume/moved moved

two_runs() {
    "$TRAIN" "${model[@]}" "${data[@]}" --steps 100000 --out o --save-every 0 >first 2>&1 &
    wait_for 60 grep -qs '^step' first
    run 2 "$TRAIN" "${model[@]}" "${data[@]}" --steps 5 --out o
    refused 'another run' --out
    run 2 "$TRAIN" "${model[@]}" "${data[@]}" --steps 5 --out o --overwrite
    refused 'another run'
    kill $!
    wait $! || no "the first run ended with $?"
    grep -q '^stopped at' first || no "the first run did not go on"
    n=$(readlink o/latest)
    steps_logged o $((10#${n#step_}))

    "$TRAIN" --resume o >first 2>&1 &
    wait_for 60 grep -qs '^step' first
    run 2 "$TRAIN" --resume o
    refused 'another run'
    kill -9 $!
    wait $!
    run 0 "$TRAIN" --resume o --steps 3 # a lock dies with its process
}
check resume/two_runs_one_folder two_runs

occupied() {
    train --out o --steps 5
    contents o >before
    run 2 "$TRAIN" "${model[@]}" "${data[@]}" --steps 5 --out o
    refused ' o ' --resume --overwrite
    # --overwrite with a mistake elsewhere: the old run is still there
    run 2 "$TRAIN" "${model[@]}" --overwrite --out o --steps 5 --input nothing
    refused nothing
    run 2 "$TRAIN" "${model[@]}" "${data[@]}" --overwrite --out o --steps 5 --topk 9
    refused --topk
    run 2 "$TRAIN" "${model[@]}" "${data[@]}" --overwrite --out o --steps 5 --batch 4000000 --seq 64
    refused --batch
    contents o >after
    same before after
}
check resume/occupied_folder occupied

overwrite() {
    train --out full --steps 6
    train --out o --steps 25 --seed 2
    echo mine >o/notes
    train --out o --steps 6 --overwrite
    same_run full o
    steps_logged o 6
    [ ! -e o/step_00000025 ] && [ ! -e o/step_00000010 ] || no "old checkpoints stayed: $(ls o)"
    [ -e o/notes ] || no "a file that is no part of the run was removed"
}
check resume/overwrite overwrite

# A rate that rises until the loss does: the best step is an early one.
keep() {
    local link
    train --out o --steps 40 --keep 1 --save-every 1 --eval-every 2 \
        --schedule constant --warmup 1000 --lr 100
    for link in latest best; do complete o/$link; done
    [ "$(readlink o/latest)" = step_00000040 ] || no "latest is $(readlink o/latest)"
    best=$(sed -nE 's/^\{"step":([0-9]+),.*"val_loss":([0-9.]+).*/\2 \1/p' o/metrics.jsonl |
        sort -g | awk 'NR == 1 { printf "step_%08d", $2 }')
    [ "$best" != step_00000040 ] || no "the last step is the best: this shows nothing"
    [ "$(readlink o/best)" = "$best" ] || no "best is $(readlink o/best), the log says $best"
    [ "$(cd o && echo step_*)" = "$best step_00000040" ] ||
        no "--keep 1 kept $(cd o && echo step_*)"
    train --out p --steps 9 --keep 3 --save-every 1 --eval-every 0
    [ "$(cd p && echo step_*)" = "step_00000007 step_00000008 step_00000009" ] ||
        no "--keep 3: $(ls p)"
    [ ! -e p/best ] || no "best without a validation"
    train --out q --steps 4 --keep 0 --save-every 1 --eval-every 0
    [ "$(ls -d q/step_* | wc -l)" = 4 ] || no "--keep 0: $(ls q)"
    [ -z "$(find o p q -name '.*' ! -name .lock)" ] || no "left behind: $(find o p q -name '.*')"
}
check resume/keep_and_best keep
