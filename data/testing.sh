# What the data/test_*.sh share; they source it. A test is a function:
#
#     check NAME FUNCTION [ARG...]
#
# runs it in a subshell, in a folder of its own, and prints "ok NAME" if it returns 0, "skip NAME:
# reason" if it ended with `skip reason`, else "FAIL NAME: reason" with the last line it wrote. `no
# REASON` ends it. Folders are under $work, removed at exit.
#
# `run STATUS COMMAND...` is the usual step: the exit status must be STATUS; what it wrote is
# in the files stdout and stderr. TRAIN, TEST, CC, MAKE and SAN come from `make test`; without it, a
# script tests ./train_moe.
set -uo pipefail
export LC_ALL=C
# More threads than processors is what several checks are about: waiting threads must not spin.
export OMP_WAIT_POLICY=passive
# A sanitizer's report is no ordinary failure. (A run that ends with an error frees nothing.)
export ASAN_OPTIONS=exitcode=66:detect_leaks=0 UBSAN_OPTIONS=exitcode=66:print_stacktrace=1

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TRAIN=${TRAIN:-$root/train_moe} TEST=${TEST:-$root/test_moe}
CC=${CC:-cc} MAKE=${MAKE:-make} SAN=${SAN:-}
on_san() { case $SAN in '' | 0 | no | off) return 1 ;; esac; } # as the Makefile has it

work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

no() { echo "$*"; exit 1; }
skip() { echo "$*"; exit 77; }

check() {
    local name=$1 reason status
    shift
    rm -rf "$work/check" && mkdir "$work/check" || exit 1
    reason=$(cd "$work/check" && trap 'kill $(jobs -p) 2>/dev/null' EXIT && "$@" 2>&1)
    status=$?
    reason=$(tail -n 1 <<<"$reason")
    case $status in
        0) echo "ok $name" ;;
        77) echo "skip $name: $reason" ;;
        *) echo "FAIL $name: ${reason:-exit status $status}" ;;
    esac
}

reason() { grep -m 1 -E "Sanitizer|runtime error:" stderr || tail -n 1 stderr; }
run() {
    local want=$1 got=0
    shift
    "$@" </dev/null >stdout 2>stderr || got=$?
    [ $got = "$want" ] ||
        no "exit status $got, expected $want: $(basename "$1") ${*:2}: $(reason)"
}

# PATTERN (grep -E) is in a line of stderr, or in FILE.
said() { grep -qE -e "$1" "${2:-stderr}" || no "not said: '$1', but: $(tail -n 1 "${2:-stderr}")"; }
# stderr is one line, an error that has all the PATTERNs.
refused() {
    local line pattern
    line=$(<stderr)
    [[ $line && $line != *$'\n'* ]] || no "expected one line on stderr, found: ${line//$'\n'/ // }"
    for pattern in '^train_moe: error: ' "$@"; do
        [[ $line =~ $pattern ]] || no "not said: '$pattern', but: $line"
    done
}
same() { cmp -s "$1" "$2" || no "${3:-} $1 and $2 differ"; }

# text LINES [SEED]: the same text on every machine. (The product stays below 2^53.)
text() {
    awk -v lines="$1" -v s="${2:-7}" 'BEGIN {
        n = split("the a light dark river stone king day night and of to in water bread house " \
            "which word hand man woman city not was were said unto them all shall upon", word, " ")
        for (i = 0; i < lines; i++) {
            s = s * 16807 % 2147483647
            line = ""
            for (k = 3 + s % 9; k > 0; k--) {
                s = s * 16807 % 2147483647
                line = line word[1 + int(s / 97) % n] (k > 1 ? " " : ".")
            }
            print line
        }
    }'
}

# tensor_at FILE.safetensors NAME: where its bytes begin and end in the file
tensor_at() {
    local header begin end
    header=$(od -An -tu8 -N8 "$1" | tr -d ' ')
    read -r begin end < <(tail -c +9 "$1" | head -c "$header" |
        sed -nE "s/.*\"$2\":\{[^}]*\"data_offsets\":\[([0-9]+),([0-9]+)\].*/\1 \2/p")
    [ "$end" ] || no "$1 has no tensor $2"
    echo $((8 + header + begin)) $((8 + header + end))
}

# The log but for its times.
log() { sed -E 's/"(step_ms|tok_per_s|elapsed_s|seconds)":[^,}]*,?//g; s/,}/}/g' "$1/metrics.jsonl"; }

# Two runs ended alike: weights, moments, log, best.
same_run() {
    local file
    for file in model.safetensors optimizer.safetensors; do
        same "$1/latest/$file" "$2/latest/$file"
    done
    [ "$(readlink "$1/latest")" = "$(readlink "$2/latest")" ] ||
        no "$1/latest, $2/latest: other steps"
    [ "$(readlink "$1/best")" = "$(readlink "$2/best")" ] ||
        no "$1/best is $(readlink "$1/best"), $2/best is $(readlink "$2/best")"
    log "$1" >log.a
    log "$2" >log.b
    cmp -s log.a log.b || no "the logs of $1 and $2 differ: $(diff log.a log.b | tail -n 1)"
}

# Every step of the log once, from 1 to N, in order.
steps_logged() {
    local n
    n=$(sed -E 's/^\{"step":([0-9]+),.*\}$/\1/' "$1/metrics.jsonl" | cmp - <(seq "$2") 2>&1) ||
        no "$1/metrics.jsonl: expected steps 1 to $2, each once: $n"
}

# What is in a folder: names, links, content. Two equal outputs: nothing changed.
contents() {
    (cd "$1" && find . -printf "%p %y %l %T@ " \( -type f -exec cksum {} \; -o -print \) | sort)
}

checkpoint_files="config.json model.safetensors optimizer.safetensors trainer.json"
complete() {
    local file
    for file in $checkpoint_files; do [ -s "$1/$file" ] || no "$1: no $file"; done
}

# The processes of this name (15 letters at most), oldest first. A small system has no pgrep.
pids_of() {
    local p
    if [ ! -r /proc/self/comm ]; then
        pgrep -x "$1"
        return
    fi
    for p in /proc/[0-9]*; do
        if [ "$(cat "$p/comm" 2>/dev/null)" = "$1" ]; then echo "${p#/proc/}"; fi
    done | sort -n
}
gone() { [ ! "$(pids_of "$1")" ] || { sleep 2 && [ ! "$(pids_of "$1")" ]; }; }

# wait_for SECONDS COMMAND...: until it succeeds
wait_for() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ $SECONDS -lt $end ] || no "waited in vain for: $*"
        sleep 0.02
    done
}

# Open MPI's settings: more ranks than cores; comm.h says how they wait; root may; shared memory only,
# without the one-sided copies that containers refuse. Other MPIs do not look at these.
mpi_settings() {
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
    export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
    export PRTE_MCA_hwloc_default_binding_policy=none
    export OMPI_MCA_mpi_yield_when_idle=0 OMPI_MCA_pml=ob1 OMPI_MCA_btl=^tcp
    export OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_btl_sm_use_cma=0
}
