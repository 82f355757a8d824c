#!/usr/bin/env bash
# Runs test programs and scripts, and counts. Usage: data/run_tests.sh PROGRAM|SCRIPT.sh ...
#
# A test writes one line on stdout for each thing it tried: "ok NAME", "FAIL NAME: reason" or
# "skip NAME: reason". Shown here are the FAIL and skip lines and a total for each program, with the
# end of its other output if it failed. A program that exits with a status other than 0 without a
# FAIL line, runs over TEST_TIMEOUT seconds, or tries nothing at all, is one failure. The last line
# is "N passed, N failed[, N skipped]"; exit status 1 if any failed.
set -uo pipefail
export LC_ALL=C

log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# On a terminal Ctrl-C must reach the tests; elsewhere the time limit must reach what they started.
seconds=${TEST_TIMEOUT:-1800}
limit=(timeout "$seconds")
[ ! -t 0 ] || limit=(timeout --foreground "$seconds")
command -v timeout >/dev/null || limit=(env)

passed=0 failed=0 skipped=0
for program in "$@"; do
    name=$(basename "$program")
    case $program in
        *.sh) run=(bash "$program") ;;
        */*) run=("$program") ;;
        *) run=("./$program") ;;
    esac
    start=$SECONDS
    "${limit[@]}" "${run[@]}" </dev/null 2>"$log/err" |
        tee "$log/out" | grep -E '^(FAIL|skip) '
    status=${PIPESTATUS[0]}

    ok=$(grep -c '^ok ' "$log/out")
    bad=$(grep -c '^FAIL ' "$log/out")
    skip=$(grep -c '^skip ' "$log/out")
    if [ "$bad" = 0 ]; then
        reason=
        case $status in
            0) [ $((ok + skip)) != 0 ] || reason="tried nothing" ;;
            124) reason="still running after $seconds seconds" ;;
            129 | 1[3-9]?) reason="killed by signal $((status - 128))" ;;
            *) reason="exit status $status" ;;
        esac
        [ -z "$reason" ] || { echo "FAIL $name: $reason"; bad=1; }
    fi
    if [ "$bad" != 0 ]; then
        { grep -vE '^(ok|FAIL|skip) ' "$log/out"; cat "$log/err"; } | tail -n 30 | sed 's/^/    | /'
    fi
    printf '%-24s %4d passed, %d failed, %d skipped  (%d s)\n' \
        "$name" "$ok" "$bad" "$skip" $((SECONDS - start))
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skip))
done

[ $# != 0 ] || { echo "FAIL run_tests: nothing to run"; failed=1; }
[ $skipped = 0 ] && tail= || tail=", $skipped skipped"
echo "$passed passed, $failed failed$tail"
[ $failed = 0 ]
