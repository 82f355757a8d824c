#!/usr/bin/env bash
# Runs the table data/cases.tsv, where a line is a case: its head says what is in a line and what
# must hold. CASES=PATTERN (grep -E) runs those alone whose name has the pattern; an argument names
# another table.
. "$(dirname "$0")/testing.sh" || exit 1

# What the commands find: train_moe in the PATH, one thread, two sets of flags.
mkdir "$work/bin" "$work/inputs" || exit 1
ln -s "$(cd "$(dirname "$TRAIN")" && pwd)/$(basename "$TRAIN")" "$work/bin/train_moe"
export PATH="$work/bin:$PATH" OMP_NUM_THREADS=1
shape="--layers 2 --d-model 16 --heads 2 --kv-heads 1 --experts 4 --topk 2 --d-expert 16"
tiny="$shape --seq 16 --batch 2 --steps 3 --warmup 1 --eval-batches 2 --sample-every 0"

# bytes N CHARACTER: N of them
bytes() { head -c "$1" /dev/zero | tr '\0' "$2"; }

# fill FILE.safetensors TENSOR CHARACTER [N]: all of the tensor, or its first N bytes, is that
fill() {
    local at begin end
    at=$(tensor_at "$1" "$2") || no "$at"
    read -r begin end <<<"$at"
    bytes "${4:-$((end - begin))}" "$3" |
        dd of="$1" bs=4k oflag=seek_bytes seek="$begin" conv=notrunc status=none
}

inputs() {
    cd "$work/inputs" || exit 1
    text 300 >text
    text 200 5 >other
    printf 'one line of text, much too short\n' >short
    mkdir folder
    for run in moe "dense --experts 1 --topk 1" "sigmoid --router sigmoid --bias-rate 0.01"; do
        train_moe $tiny --steps 4 --save-every 2 --eval-every 2 --input text --out $run \
            >"$work/log" 2>&1 || no "--out $run: $(tail -n 1 "$work/log")"
    done
}

# What is there, but for what a refused command may make: a lock in the folder of a run, which also
# changes that folder's time.
listing() { find . ! -name .lock \( -type d -printf '%p\n' -o -printf '%p %l %s %T@\n' \) | sort; }

one() { # STATUS COMMAND PATTERN
    local want=$1 command=$2 pattern=$3 got=0 alone
    cp -a "$work/inputs/." .
    [[ $want != 2 || $command =~ [\;\&\|\>] ]] || alone=1
    [ ! "${alone-}" ] || listing >"$work/before"
    (trap 'kill $(jobs -p) 2>/dev/null' EXIT; eval "$command") \
        </dev/null >"$work/stdout" 2>"$work/stderr" || got=$?
    [ ! "${alone-}" ] || listing >"$work/after"
    cd "$work" || exit 1 # where stdout and stderr are
    ! grep -m 1 -E 'Sanitizer|runtime error:' stderr || exit 1
    [ $got = "$want" ] || no "exit status $got, expected $want: $(cat stdout stderr | tail -n 1)"
    case $want in
        2) refused && said "$pattern" ;;
        1)
            grep -v '^train_moe: warning: ' stderr >error
            [ "$(wc -l <error)" = 1 ] && grep -q '^train_moe: error: ' error ||
                no "expected one error on stderr, found: $(tr '\n' '/' <error)"
            said "$pattern" error
            ;;
        0)
            ! grep -m 1 'error: ' stderr || exit 1
            if [ "$pattern" ]; then said "$pattern"; else ! grep -m 1 . stderr || exit 1; fi
            ;;
        *) no "status $want is none that the program should have" ;;
    esac
    [ ! "${alone-}" ] || cmp -s before after ||
        no "a refused command changed $(diff before after | sed -n 's/^[<>] //p' | head -n 1)"
}

case_of_table() { # NAME STATUS COMMAND PATTERN
    # the address space of a sanitizer build is as large as it wants
    ! on_san || [[ $3 != *'ulimit -'[vd]* ]] || skip "the sanitizers take any address space"
    one "$2" "$3" "$4"
}

table=${1:-$root/data/cases.tsv}
check cases/inputs inputs
[ -e "$work/inputs/sigmoid/latest" ] || exit 1
while IFS= read -r line; do
    [[ $line && $line != '#'* ]] || continue
    tabs=${line//[!$'\t']/}
    name=${line%%$'\t'*} rest=${line#*$'\t'}
    status=${rest%%$'\t'*} rest=${rest#*$'\t'}
    command=${rest%%$'\t'*} pattern=${rest#*$'\t'}
    [[ $name =~ ${CASES:-} ]] || continue
    if [ ${#tabs} != 3 ] || [ ! "$command" ]; then
        echo "FAIL cases/$name: expected four columns in data/cases.tsv"
    else
        check "cases/$name" case_of_table "$name" "$status" "$command" "$pattern"
    fi
done <"$table"
