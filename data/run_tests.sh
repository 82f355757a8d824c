#!/usr/bin/env bash
# Runs test programs and scripts, and counts. Usage: data/run_tests.sh PROGRAM|SCRIPT.sh ...
#
# A test writes one line on stdout for each thing it tried: "ok NAME", "FAIL NAME: reason" or
# "skip NAME: reason". Shown here are the FAIL and skip lines and a total for each program, with the
# end of its other output if it failed. A program that exits with a status other than 0 without a
# FAIL line, runs over TEST_TIMEOUT seconds, or tries nothing at all, is one failure. The last line
# is "N passed, N failed[, N skipped]"; exit status 1 if any failed.
#
# Where there are two processors, scripts that say "lane: builds" in their head, which compile other
# builds of the program in the tree, run one after the other beside all the rest; TEST_LANES=1 runs
# everything in turn.
set -uo pipefail
export LC_ALL=C

log=$(mktemp -d)
lanes=()
trap 'rm -rf "$log"' EXIT
ended() { # STATUS
    kill -TERM "${lanes[@]}" 2>/dev/null
    wait
    exit "$1"
}
trap 'ended 130' INT
trap 'ended 143' TERM

seconds=${TEST_TIMEOUT:-1800}
limit=(timeout "$seconds")
command -v timeout >/dev/null || limit=(env)

# One program: its lines and its total, all at once; three numbers are added to COUNTS.
try() { # FOLDER PROGRAM
    local folder=$1 program=$2 name run start status ok bad skip reason
    name=$(basename "$program")
    case $program in
        *.sh) run=(bash "$program") ;;
        */*) run=("$program") ;;
        *) run=("./$program") ;;
    esac
    start=$SECONDS
    "${limit[@]}" "${run[@]}" </dev/null 2>"$folder/err" >"$folder/out" &
    running=$!
    wait $running
    status=$?
    ok=$(grep -c '^ok ' "$folder/out")
    bad=$(grep -c '^FAIL ' "$folder/out")
    skip=$(grep -c '^skip ' "$folder/out")
    reason=
    if [ "$bad" = 0 ]; then
        case $status in
            0) [ $((ok + skip)) != 0 ] || reason="tried nothing" ;;
            124) reason="still running after $seconds seconds" ;;
            129 | 1[3-9]?) reason="killed by signal $((status - 128))" ;;
            *) reason="exit status $status" ;;
        esac
    fi
    {
        grep -E '^(FAIL|skip) ' "$folder/out"
        [ -z "$reason" ] || { echo "FAIL $name: $reason"; bad=1; }
        if [ "$bad" != 0 ]; then
            { grep -vE '^(ok|FAIL|skip) ' "$folder/out"; cat "$folder/err"; } |
                tail -n 30 | sed 's/^/    | /'
        fi
        printf '%-24s %4d passed, %d failed, %d skipped  (%d s)\n' \
            "$name" "$ok" "$bad" "$skip" $((SECONDS - start))
    } >"$folder/said"
    cat "$folder/said"
    echo "$ok $bad $skip" >>"$folder/counts"
}
lane() { # NAME PROGRAM...
    local folder=$log/$1 program running=
    trap 'kill -TERM $running 2>/dev/null; exit 143' TERM # timeout takes all that it started along
    trap - EXIT
    shift
    mkdir "$folder" && : >"$folder/counts"
    for program; do try "$folder" "$program"; done
}

builds=() rest=()
for program; do
    if [ "$(nproc 2>/dev/null || echo 1)" -gt 1 ] && [ "${TEST_LANES:-2}" != 1 ] &&
        case $program in *.sh) head -n 5 "$program" | grep -q 'lane: builds' ;; *) false ;; esac; then
        builds+=("$program")
    else
        rest+=("$program")
    fi
done
for list in builds rest; do
    declare -n programs=$list
    [ ${#programs[@]} != 0 ] || continue
    lane "$list" "${programs[@]}" &
    lanes+=($!)
done
wait

if [ $# = 0 ]; then
    echo "FAIL run_tests: nothing to run"
    mkdir "$log/none" && echo 0 1 0 >"$log/none/counts"
fi
cat "$log"/*/counts | awk '
    { passed += $1; failed += $2; skipped += $3 }
    END {
        print passed " passed, " failed + 0 " failed" (skipped ? ", " skipped " skipped" : "")
        exit failed > 0
    }'
