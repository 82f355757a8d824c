#!/usr/bin/env bash
# A checkpoint is there or it is not: whatever stops a run (kill -9, a full disk, a limit, a call
# that fails), the checkpoint before it loads, the reason is said, and the resumed run ends with the
# same bytes as one that nothing happened to.
. "$(dirname "$0")/testing.sh"

kills=50
base=4 # steps that are saved before something is made to fail

text 300 >"$work/text"
small=(--input "$work/text" --layers 1 --d-model 16 --heads 2 --kv-heads 1 --experts 3 --topk 2
    --d-expert 16 --seq 16 --batch 2 --schedule constant --warmup 2 --eval-every 1 --eval-batches 2
    --save-every 1 --threads 1)

train() { run 0 "$TRAIN" "${small[@]}" "$@"; }
loads() { run 0 "$TRAIN" eval --model "$1" --input "$work/text" --eval-batches 1; }

# After a failure: every name step_N is a checkpoint that loads, and so is what the links stand for.
all_load() {
    local folder newest
    newest=$(cd "$1" && ls -d step_* | tail -n 1)
    [ "$newest" ] || no "no checkpoint is left in $1"
    for folder in "$1"/step_*; do
        complete "$folder"
        loads "$folder"
    done
    for folder in "$1/latest" "$1/best"; do
        [ ! -L "$folder" ] || complete "$folder"
    done
}

# ---- kill -9 -------------------------------------------------------------------------------------
# Chains of killed and resumed runs, until there were $kills kills; each chain reaches the end.
# $work/kill.seed makes the delays: the same ones each time, though not the same moments.
kill_9() {
    local steps=40 seed=1 killed=0 chains=0 newest last span pid
    last=$(date +%s%N)
    train --out full --steps $steps --keep 2
    span=$((($(date +%s%N) - last) / 4000)) # microseconds of a quarter of the run
    while [ $killed -lt $kills ] || [ -d o ]; do
        newest=$(ls o 2>/dev/null | sed -n 's/^step_0*//p' | tail -n 1)
        if [ "$newest" ]; then
            "$TRAIN" --resume o >out 2>stderr &
        else
            rm -rf o
            "$TRAIN" "${small[@]}" --out o --steps $steps --keep 2 >out 2>stderr &
        fi
        pid=$!
        if [ $killed -lt $kills ]; then
            seed=$((seed * 16807 % 2147483647))
            sleep "$(printf '0.%06d' $((seed % (span < 900000 ? span : 900000))))"
            kill -9 $pid 2>/dev/null
        fi
        if wait $pid 2>/dev/null; then
            same_run full o
            steps_logged o $steps
            [ -z "$(find o -name '.*' ! -name .lock)" ] || no "left behind: $(find o -name '.*')"
            chains=$((chains + 1))
            rm -rf o
            continue
        fi
        ! grep -q error: stderr || no "after $killed kills: $(grep error: stderr)"
        killed=$((killed + 1))
        [ -d o ] && ls o | grep -q ^step_ || continue
        all_load o
        last=$(ls o | sed -n 's/^step_0*//p' | tail -n 1)
        [ "$last" -ge "${newest:-0}" ] ||
            no "kill $killed: step $newest was saved, now there is $last"
    done
    [ $chains -gt 0 ] || no "no chain came to its end"
}
check "crash/kill_9_${kills}_times" kill_9

# ---- system calls that fail ----------------------------------------------------------------------
faulty() { # CALL N ERRNO COMMAND...
    rm -f mark
    env LD_PRELOAD="$work/faults.so" FAULT_UNDER=o/ FAULT_CALL="$1" FAULT_N="$2" FAULT_ERRNO="$3" \
        FAULT_MARK="$PWD/mark" "${@:4}" </dev/null >out 2>stderr
}

faults_work() {
    on_san && skip "LD_PRELOAD and the sanitizers exclude each other"
    [ -d /proc/self/fd ] || skip "no /proc here"
    if ! $CC -O1 -shared -fPIC -o "$work/faults.so" "$root/data/faults.c" -ldl >out 2>&1; then
        no "$CC cannot build data/faults.c: $(tail -n 1 out)"
    fi
    train --out o --steps 1
    faulty mkdir 1 28 "$TRAIN" --resume o --steps 2
    [ -e mark ] || skip "LD_PRELOAD has no effect on $TRAIN"
}
check crash/faults_can_be_made faults_work

before() { # the run in which a call will fail: o; how it ends without: full
    train --out full --steps $((base + 1)) --keep 2
    train --out start --steps $base --keep 2
}
before_replaced() { # the same step is saved again, since its first checkpoint is damaged
    before
    truncate -s -1 start/step_0000000$base/model.safetensors
}
restart() { rm -rf o && cp -a start o; }
again() { "$TRAIN" --resume o --steps $((base + 1)); }

# Each n-th call of a kind, until there are no more. STRIDE skips some in the middle of many.
sweep() { # CALL STRIDE PREPARE
    local call=$1 stride=$2 n status errno fired=0 where
    [ -e "$work/faults.so" ] && [ ! -e "$work/no_faults" ] || skip "see crash/faults_can_be_made"
    $3
    for ((n = 1; ; n += n < 6 ? 1 : stride)); do
        restart
        errno=$((n % 2 ? 28 : 5)) # ENOSPC, EIO
        status=0
        faulty "$call" $n $errno "$TRAIN" --resume o --steps $((base + 1)) || status=$?
        [ -e mark ] || break
        fired=$((fired + 1))
        where="$call $n ($(sed 's|.*/o/|o/|' mark))"
        if [ $status = 0 ]; then # only what makes nothing wrong but a leftover
            grep -q '\.del$' mark || no "$where failed and the exit status is 0"
            said '^train_moe: warning: .*o/'
        else
            [ $status = 1 ] || no "$where: exit status $status: $(tail -n 1 stderr)"
            grep '^train_moe: error: ' stderr >error
            [ "$(wc -l <error)" = 1 ] || no "$where: expected one error: $(cat stderr)"
            grep -q 'o/' error || no "$where: the error names no file: $(cat error)"
            grep -qE 'No space left|Input/output error' error ||
                no "$where: no reason: $(cat error)"
        fi
        [ "$3" = before ] && all_load o
        loads o/step_0000000$((base - 1))
        run 0 "$TRAIN" --resume o --steps $((base + 1))
        same_run full o
        steps_logged o $((base + 1))
        [ -z "$(find o -name '.*' ! -name .lock)" ] ||
            no "$where: left behind: $(find o -name '.*')"
    done
    [ $fired -gt 0 ] || no "no $call was made to fail"
    [ $status = 0 ] || no "$call without a fault: exit status $status: $(cat stderr)"
}
for call in mkdir open fsync close rename symlink; do check crash/$call sweep $call 1 before; done
check crash/write sweep write 4 before
for call in fsync rename symlink; do check crash/replaced_$call sweep $call 1 before_replaced; done
FAULT_NO_EXCHANGE=1 check crash/replaced_without_exchange sweep rename 1 before_replaced

# The exchange of two folders fails: two renames do the same.
exchange() {
    [ -e "$work/faults.so" ] || skip "see crash/faults_can_be_made"
    before_replaced
    restart
    faulty exchange 1 22 "$TRAIN" --resume o --steps $((base + 1)) || no "$(cat stderr)"
    [ -e mark ] || skip "renameat2 is not used here"
    same_run full o
}
check crash/no_exchange exchange

harmless() { # CALL N ERRNO: must change nothing
    [ -e "$work/faults.so" ] || skip "see crash/faults_can_be_made"
    before
    restart
    faulty "$@" "$TRAIN" --resume o --steps $((base + 1)) || no "exit status $?: $(cat stderr)"
    [ "$1" = short ] || [ -e mark ] || no "no $1 was made to fail"
    same_run full o
}
check crash/short_writes harmless short 0 0
check crash/write_interrupted harmless write 7 4
check crash/fsync_interrupted harmless fsync 4 4
check crash/fsync_not_supported harmless fsync 5 22

# ---- limits and full disks -----------------------------------------------------------------------
limited() { (ulimit -f "$1" && exec "${@:2}"); }
file_size_limit() {
    local blocks
    before
    for blocks in 1 4 14 30; do # the log, a small file, the weights, the moments (KiB)
        restart
        run 1 limited $blocks "$TRAIN" --resume o --steps $((base + 1))
        refused 'File too large'
        all_load o
        run 0 "$TRAIN" --resume o --steps $((base + 1))
        same_run full o
    done
    # no checkpoint is due: it is the log that fails
    rm -rf o
    run 1 limited 4 "$TRAIN" "${small[@]}" --out o --steps 90 --save-every 0 --eval-every 0
    refused o/metrics.jsonl 'File too large'
}
check crash/file_size_limit file_size_limit

# In a file system of 2 MB with so many pages free: the log, each of the files, each of the saves.
full_disk() {
    local disk=$1 free
    before
    for free in 0 1 2 3 5 9 14 20 24 31 40 60 90; do
        rm -rf "$disk"/*
        cp -a start "$disk/o"
        cat /dev/zero >"$disk/fill" 2>/dev/null
        truncate -s -$((free * 4096)) "$disk/fill"
        run 1 "$TRAIN" --resume "$disk/o" --steps 40 --keep 0
        refused 'No space left' "$disk/o"
        all_load "$disk/o"
        rm "$disk/fill"
        run 0 "$TRAIN" --resume "$disk/o" --steps 10 --keep 2
        [ -e full10 ] || { train --out full10 --steps 10 --keep 2; }
        same full10/latest/model.safetensors "$disk/o/step_00000010/model.safetensors" \
            "$free pages:"
        same full10/latest/optimizer.safetensors "$disk/o/step_00000010/optimizer.safetensors"
    done
}
on_disk() {
    local disk="$work/disk"
    mkdir -p "$disk"
    mount -t tmpfs -o size=2m none "$disk" 2>stderr || no "cannot mount: $(tail -n 1 stderr)"
    (full_disk "$disk") || { umount "$disk"; exit 1; }
    umount "$disk"
}
disk_check() {
    mkdir -p "$work/disk"
    if [ "$(id -u)" = 0 ] && mount -t tmpfs none "$work/disk" 2>/dev/null; then
        umount "$work/disk"
        on_disk
    elif unshare -rm true 2>/dev/null; then
        unshare -rm bash "$root/data/test_crash.sh" full_disk | grep . >disk.out
        grep -q '^ok ' disk.out || no "$(sed 's/^[^:]*: //' disk.out | tail -n 1)"
    else
        skip "neither mount (as root) nor unshare -rm is permitted here"
    fi
}
check crash/full_disk disk_check

cannot_write() {
    local out
    echo text >file
    for out in file file/o /proc/o /dev/null/o; do
        run 2 "$TRAIN" "${small[@]}" --steps 2 --out "$out"
        refused "$out"
    done
    [ "$(cat file)" = text ] || no "the file was overwritten"
    [ "$(id -u)" != 0 ] || exit 0 # root may write everywhere
    mkdir shut && chmod 555 shut
    run 2 "$TRAIN" "${small[@]}" --steps 2 --out shut/o
    refused shut/o 'Permission denied'
    train --out o --steps 2
    chmod 555 o
    run 2 "$TRAIN" --resume o --steps 3
    chmod 755 o
    refused o 'Permission denied'
}
check crash/unwritable_out cannot_write

# ---- standard output -----------------------------------------------------------------------------
# A run that cannot print its lines is still a run.
stdout() {
    local status how
    train --out full --steps 6 --keep 2
    for how in '>/dev/full' '>&-' '<&- >&-' '<&- >&- 2>&-'; do
        rm -rf o
        status=0
        eval '"$TRAIN" "${small[@]}" --out o --steps 6 --keep 2 2>stderr' "$how" || status=$?
        [ $status -le 1 ] || no "$how: exit status $status"
        [ $status = 0 ] || said 'standard output'
        [ "$how" != '>/dev/full' ] || [ $status = 1 ] || no "$how: output is lost and nothing said"
        same_run full o
        steps_logged o 6
        ! grep -rqs 'loss .* | norm' o ||
            no "$how: output went into $(grep -rls 'loss .* | norm' o)"
        ! grep -q '[^0-9]' o/.lock || no "$how: output went into the lock"
    done
    rm -rf o
    "$TRAIN" "${small[@]}" --out o --steps 6 --keep 2 2>stderr | head -n 1 >/dev/null
    status=${PIPESTATUS[0]}
    [ "$status" = 0 ] || no "closed pipe: exit status $status: $(cat stderr)"
    same_run full o
    for how in "generate --model o --tokens 9" info --help "eval --model o --input $work/text"; do
        "$TRAIN" $how >/dev/full 2>stderr && no "$how >/dev/full: exit status 0"
        said 'No space left'
    done
}
check crash/stdout stdout
