#!/usr/bin/env bash
# A run on several ranks of this machine: test_parallel under mpirun, and whole runs of train_moe: the
# same losses as on one rank, checkpoints that know no ranks, and what must happen when one of the
# ranks gets a signal, cannot read, or is killed. One machine with few cores is enough; as root too.
. "$(dirname "$0")/testing.sh"
PARALLEL=${TEST%/*}/test_parallel
mpi_settings

if [ "$("${TEST%/*}/test_comm" build)" != MPI ] || ! command -v mpirun >/dev/null; then
    echo "skip parallel: no MPI, or no mpirun (Debian: apt-get install libopenmpi-dev openmpi-bin)"
    exit 0
fi

# ---- models --------------------------------------------------------------------------------------
# Every check of test_parallel, under its own names.
every() { # RANKS [ARG...]
    local status=0 n=$1
    shift
    OMP_NUM_THREADS=1 timeout 300 mpirun -n "$n" "$PARALLEL" "$@" \
        </dev/null >"$work/out" 2>"$work/err" || status=$?
    grep -E '^(ok|FAIL|skip) ' "$work/out"
    [ $status = 0 ] || grep -q '^FAIL ' "$work/out" || {
        echo "FAIL parallel_$n: exit status $status:" \
            "$(grep -m 1 -E 'Sanitizer|runtime error:|: error: ' "$work/err")"
    }
}
every 1
for n in 2 4; do every $n; done
every 3 dense
if [ "${EMULATED:-}" ]; then # the kernels, two ranks, both types
    every 2 --device fp32
    every 2 --device bf16
fi

# ---- whole runs ----------------------------------------------------------------------------------
text 300 >"$work/text"
model=(--layers 2 --d-model 32 --heads 2 --kv-heads 1 --experts 8 --topk 2 --d-expert 16)
flags=("${model[@]}" --input "$work/text" --seq 16 --batch 5 --lr 0.003 --warmup 2 --eval-every 4
    --eval-batches 6 --sample-every 0 --threads 1)
ranks() { # STATUS RANKS ARG...
    local want=$1 n=$2
    shift 2
    run "$want" timeout 100 mpirun -n "$n" "$TRAIN" "$@"
}
once() { # PATTERN: one error line, by one of the ranks
    [ "$(grep -c '^train_moe: error: ' stderr)" = 1 ] ||
        no "$(grep -c '^train_moe: error: ' stderr) ranks said: $(grep -m 1 error: stderr)"
    said "$1"
}
column() { sed -nE "s/.*\"$2\":([0-9.e+-]+)[,}].*/\1/p" "$1/metrics.jsonl"; }
near() { # RUN RUN: every loss, norm, balance loss and validation loss
    local key
    for key in loss grad_norm aux_loss val_loss; do
        column "$1" $key >"a.$key"
        column "$2" $key >"b.$key"
        paste "a.$key" "b.$key" | awk '{ d = $1 / $2 - 1; if (!(d < 1e-5 && d > -1e-5)) bad = 1 }
            END { exit bad || !NR }' ||
            no "$key of $1 and $2: $(paste -sd ' ' "a.$key"), $(paste -sd ' ' "b.$key")"
    done
    steps_logged "$2" "$(wc -l <"$1/metrics.jsonl")"
}
# What is in FILE.safetensors, but for the values.
header() { head -c "$((8 + $(od -An -tu8 -N8 "$1")))" "$1"; }

alone() { # once, for all
    [ -d "$work/alone" ] ||
        run 0 "$TRAIN" "${flags[@]}" --steps 12 --save-every 4 --keep 0 --out "$work/alone" "$@"
}
# The files, the log and the losses are those of one rank; two runs are the same bytes.
layout() { # RANKS ARG...
    local n=$1
    shift
    alone
    ranks 0 "$n" "${flags[@]}" --steps 12 --save-every 4 --keep 0 --out o "$@"
    said "^ranks: $n, each with " stdout
    near "$work/alone" o
    same "$work/alone/latest/config.json" o/latest/config.json
    header "$work/alone/latest/model.safetensors" >a
    header o/latest/model.safetensors | cmp -s a - || no "model.safetensors has other tensors"
    header "$work/alone/latest/optimizer.safetensors" >a
    header o/latest/optimizer.safetensors | cmp -s a - || no "optimizer.safetensors has other tensors"
    ranks 0 "$n" "${flags[@]}" --steps 12 --save-every 4 --keep 0 --out p "$@"
    same_run o p
    grep -q '"comm":{"all-reduce":{"calls":[0-9]*,"bytes":[0-9]*,"seconds":' o/metrics.jsonl ||
        no "no traffic in the log: $(head -n 1 o/metrics.jsonl)"
}
check parallel/run_2 layout 2
check parallel/run_2_ep layout 2 --ep 2
check parallel/run_4_ep2_zero layout 4 --ep 2 --zero 1 --dispatch alltoall
check parallel/run_4_ep4_chunks layout 4 --ep 4 --dispatch allgather --dispatch-chunk 9

# Saved on 4 ranks, resumed on 1, 2 and 4: as if it had not stopped.
resumed() { # RANKS ARG...
    local n=$1 step
    shift
    alone
    ranks 0 4 "${flags[@]}" --steps 12 --save-every 4 --keep 0 --out full --ep 4 --zero 1
    cp -a full o
    rm -r o/step_00000008 o/step_00000012
    for step in latest best; do ln -sfn step_00000004 o/$step; done
    ranks 0 "$n" --resume o "$@"
    said '^resumed at step 4 of 12' stdout
    near "$work/alone" o
    if [ "$n" = 4 ]; then same_run full o; fi
    run 0 "$TRAIN" eval --model o --input "$work/text" --eval-batches 3 --threads 1
    cp stdout eval.o
    run 0 "$TRAIN" eval --model "$work/alone" --input "$work/text" --eval-batches 3 --threads 1
    [ "$(cut -c -11 eval.o)" = "$(cut -c -11 stdout)" ] || no "evaluates to $(<eval.o), not $(<stdout)"
}
check parallel/resumed_4 resumed 4
check parallel/resumed_2 resumed 2 --ep 2
check parallel/resumed_1 resumed 1 --ep 1 --zero 0
more_ranks() { # of a run that one rank began
    alone
    cp -a "$work/alone" o
    rm -r o/step_00000008 o/step_00000012
    for step in latest best; do ln -sfn step_00000004 o/$step; done
    ranks 0 4 --resume o --ep 2 --zero 1
    near "$work/alone" o
}
check parallel/resumed_from_1 more_ranks
# Another placement after every checkpoint: the training stays what it was.
placements() {
    local i
    alone
    for i in 1 2; do
        awk -v turn=$i 'BEGIN {
            printf "{\"experts\": 8, \"ranks\": 2, \"layers\": ["
            for (l = 0; l < 2; l++) {
                printf "%s{\"layer\": %d, \"ranks\": [[", l ? ", " : "", l
                for (k = 0; k < 8; k++)
                    printf "%s%d", k == 4 ? "], [" : k ? ", " : "", (3 * k + turn * (l + 1)) % 8
                printf "]]}"
            }
            print "]}"
        }' >placed.$i
    done
    ranks 0 4 "${flags[@]}" --steps 12 --save-every 4 --keep 0 --out o --ep 2 --placement placed.1
    near "$work/alone" o
    rm -r o/step_00000008 o/step_00000012
    for i in latest best; do ln -sfn step_00000004 o/$i; done
    ranks 0 4 --resume o --placement placed.2
    near "$work/alone" o
    grep -q '"placement": "placed.2"' o/latest/trainer.json || no "the placement is not kept"
    ranks 2 4 --resume o --steps 14 --ep 4 --placement placed.2
    once 'placement: placed.2: .*2.*4|4.*2'
    # where it fits no more, it is left behind
    ranks 0 2 --resume o --steps 14 --ep 1
    said 'warning: --placement placed.2: the run had it, but every rank has all experts now'
    ranks 0 4 "${flags[@]}" --steps 2 --out p --ep 2 --placement placed.1
    rm placed.1
    ranks 0 2 --resume p --steps 4
    said 'warning: --placement placed.1: the run had it, but '
    ranks 0 2 --resume p --steps 6 --placement none
    ! grep -q placement stderr || no "$(grep -m 1 placement stderr)"
}
check parallel/placements placements
# A run from before there were ranks.
older() {
    alone
    cp -a "$work/alone" o
    rm -r o/step_00000008 o/step_00000012
    for step in latest best; do ln -sfn step_00000004 o/$step; done
    sed -i -E '/^ *"(dense|routing-every|ep|zero|dispatch|dispatch-dtype|dispatch-chunk|placement)": /d' \
        o/latest/trainer.json
    ! grep -q '"zero"' o/latest/trainer.json || no "the flags are not as this test expects"
    ranks 0 2 --resume o --ep 2
    near "$work/alone" o
    sed -i '/"warmup": /d' o/latest/trainer.json # one that every version has
    run 2 "$TRAIN" --resume o --steps 14
    refused 'expected the flag "warmup", found none'
}
check parallel/older_run older
# A layout that was kept and does not fit any more is not in the way.
forgotten() {
    ranks 0 4 "${flags[@]}" --steps 2 --out o --ep 4 --zero 1
    run 0 "$TRAIN" --resume o --steps 4
    said 'warning: --ep 4: .*1 rank' stderr
    steps_logged o 4
}
check parallel/forgotten_layout forgotten

# ---- signals and failures ------------------------------------------------------------------------
logged() { [ -f "$1/metrics.jsonl" ] && [ "$(wc -l <"$1/metrics.jsonl")" -ge "$2" ]; }
start() { # a long run of three ranks in the background
    cp "$TRAIN" rank_train
    timeout 100 mpirun -n 3 "$PWD/rank_train" "${flags[@]}" --steps 100000 --schedule constant \
        --eval-every 0 --save-every 50 --out o "$@" </dev/null >stdout 2>stderr &
    job=$!
    wait_for 30 logged o 60
}
ended() { # STATUS SECONDS
    local status=0 began=$SECONDS
    wait "$job" || status=$?
    [[ $status =~ ^($1)$ ]] || no "exit status $status, expected $1: $(reason)"
    [ $((SECONDS - began)) -le "$2" ] || no "it took $((SECONDS - began)) seconds"
    gone rank_train || no "a rank is still there"
}
terminated() { # one rank gets the signal, all save the same step
    local step
    start --zero 1
    kill -TERM "$(pids_of rank_train | sed -n "$1p")"
    ended 0 20
    said '^stopped at step [0-9]+ and saved it; to go on: train_moe --resume o' stdout
    step=$(sed -nE 's/^stopped at step ([0-9]+) .*/\1/p' stdout)
    complete o/latest
    steps_logged o "$step"
    ranks 0 2 --resume o --steps $((step + 2))
    steps_logged o $((step + 2))
}
for i in 1 2 3; do check parallel/sigterm_$i terminated $i; done
handed_on() { # SIGUSR1, which mpirun gives to every rank
    start
    kill -USR1 "$(for p in $(pids_of mpirun); do
        [ "$(cut -d ' ' -f 4 "/proc/$p/stat")" != "$job" ] || echo "$p"
    done)"
    ended 0 20
    said '^stopped at step [0-9]+ and saved it' stdout
}
check parallel/sigusr1 handed_on
killed() { # the others end; what was saved is whole
    start
    kill -KILL "$(pids_of rank_train | sed -n "$1p")"
    ended '[1-9][0-9]*' 20
    complete o/latest
    run 0 "$TRAIN" eval --model o/latest --input "$work/text" --eval-batches 1
}
check parallel/killed_1 killed 1
check parallel/killed_3 killed 3

cannot_open() { # only one of the ranks lacks its file
    run 2 timeout 30 mpirun -n 2 "$TRAIN" "${flags[@]}" --steps 2 --out o : \
        -n 1 "$TRAIN" "${flags[@]/$work\/text/missing}" --steps 2 --out o
    once 'error: --input missing: '
    [ ! -e o/latest ] || no "they trained"
}
check parallel/cannot_open cannot_open
cannot_resume() { # nor its checkpoint
    ranks 0 2 "${flags[@]}" --steps 2 --out o
    cp -a o other
    echo nonsense >other/latest/model.safetensors
    run 2 timeout 30 mpirun -n 1 "$TRAIN" --resume o --steps 4 : -n 1 "$TRAIN" --resume other --steps 4
    [ "$(wc -l <o/metrics.jsonl)" = 2 ] || no "it went on"
}
check parallel/cannot_resume cannot_resume
# Folders that are not shared: the ranks would wait for one another, or train on different things.
not_shared() {
    text 300 9 >other
    run 2 timeout 30 mpirun -n 2 "$TRAIN" "${flags[@]}" --steps 2 --out o : \
        -n 1 "$TRAIN" "${flags[@]/$work\/text/other}" --steps 2 --out o
    once 'error: rank 2 on .*: expected the same texts .* as rank 0'
    ranks 0 2 "${flags[@]}" --steps 4 --save-every 2 --out o
    mkdir elsewhere && cp -a o elsewhere && rm -r elsewhere/o/step_00000004
    for i in latest best; do ln -sfn step_00000002 elsewhere/o/$i; done
    run 2 timeout 30 mpirun -n 1 "$TRAIN" --resume o --steps 6 : \
        -n 1 -wdir elsewhere "$TRAIN" --resume o --steps 6
    once 'error: rank 1 on .*: expected the same checkpoints as rank 0'
    [ "$(wc -l <o/metrics.jsonl)" = 4 ] || no "it went on"
}
check parallel/not_shared not_shared
# The folder that is replaced is the one that is read.
in_place() {
    ranks 0 2 "${flags[@]}" --steps 2 --out o
    ranks 0 3 "${flags[@]}" --steps 2 --init o --out o --overwrite
    steps_logged o 2
}
check parallel/init_in_place in_place
refusals() {
    ranks 0 2 --help
    [ "$(grep -c '^usage: ' stdout)" = 1 ] && ! grep -q train_moe stderr || no "help: $(reason)"
    ranks 2 3 --nonsense
    once 'nonsense'
    ranks 2 2 "${flags[@]}" --ep 4 --out o
    once '--ep: expected a divisor of the 2 ranks, found 4'
    ranks 2 3 "${flags[@]}" --ep 3 --out o
    once '--ep: expected a divisor of the 8 experts, found 3'
    ranks 2 2 "${flags[@]}" --batch 1 --out o
    once '--batch: expected at least a sequence for each of the 2 ranks, found 1'
    ranks 2 2 "${flags[@]}" --experts 1 --topk 1 --ep 2 --out o
    once '--ep: expected a model with --experts 2 or more'
    ranks 2 2 generate --prompt a
    once 'generate: expected one rank, found 2'
    run 2 "$TRAIN" "${flags[@]}" --ep 2 --out o
    refused '--ep: expected a divisor of the 1 rank, found 2; mpirun -n N'
    [ ! -e o ] || no "a refused run made its folder"
    alone
    ranks 2 2 "${flags[@]}" --out "$work/alone"
    once 'holds 3 checkpoints'
}
check parallel/refusals refusals
not_finite() { # one line, however many ranks
    ranks 1 2 "${flags[@]}" --steps 20 --lr 100 --warmup 0 --grad-clip 0 --optimizer sgd --out o --ep 2
    once 'error: step [0-9]+: .*not finite'
}
check parallel/not_finite not_finite

# ---- a layout that is not there ------------------------------------------------------------------
planned() {
    local bytes
    run 0 "$TRAIN" info --preset small --ranks 64 --ep 8 --batch 64 # the README's
    run 2 "$TRAIN" info --preset tiny --layers 1 --experts 256 --topk 8 --ranks 8 --ep 8 --batch 32768 \
        --seq 4096 --dispatch-chunk 16777216
    refused '--dispatch-chunk: expected fewer tokens'
    run 0 "$TRAIN" info "${model[@]}" --experts 64 --batch 128 --seq 16 --ranks 64 --ep 16 --zero 1
    said '^64 ranks, 4 with each expert, 2 sequences of a micro-batch on this one, ZeRO-1$' stdout
    said '^  rows, dedup ' stdout
    # what two ranks were planned to send for their gradients is what they sent
    run 0 "$TRAIN" info "${model[@]}" --batch 5 --seq 16 --ranks 2
    bytes=$(sed -nE 's/^  gradients .* ([0-9.]+) MB a step$/\1/p' stdout)
    ranks 0 2 "${flags[@]}" --steps 1 --out o
    sed -nE 's/.*"all-reduce":\{"calls":[0-9]+,"bytes":([0-9]+),.*/\1/p' o/metrics.jsonl |
        awk -v mb="$bytes" '{ d = $1 / 2e6 - mb; exit !(d < 0.01 && d > -0.01) }' ||
        no "planned $bytes MB, sent $(head -n 1 o/metrics.jsonl)"
}
check parallel/planned planned
