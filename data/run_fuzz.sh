#!/usr/bin/env bash
# What `make fuzz` runs once the fuzz programs are built: each of them for FUZZ_S seconds, one after
# the other. Usage: data/run_fuzz.sh PROGRAM ..., named fuzz_TARGET (test_fuzz.c).
#
# It starts from data/fuzz/TARGET and what earlier runs found in build/fuzz/TARGET, where all that
# reaches new code is kept; nothing in data/ is changed. A line for each target: how many files were
# tried, how many places of the code were reached, and the finding, with the file that shows it: it
# stays in build/fuzz/found. Exit status 1 if there was one.
#
# A finding is anything that test_fuzz.c refuses, a report of a sanitizer, a leak, more than 10
# seconds, or a single piece of memory above 16 MB. No reader needs as much for a file of 8 KB: what
# it takes follows from the file's size, at most some 100 bytes for a byte of JSON; the largest
# piece is the 2 MB in which an encoder remembers words.
set -uo pipefail
export LC_ALL=C OMP_NUM_THREADS=1
cd "$(dirname "$0")/.." || exit 1
seconds=${FUZZ_S:-60}
case $seconds in
    '' | *[!0-9]* | 0*) echo "fuzz: FUZZ_S=$seconds: expected a number of seconds" >&2; exit 2 ;;
esac

# the targets' own files: in memory, where that can be had
shm=/dev/shm
[ -w "$shm" ] || shm=${TMPDIR:-/tmp}
TMPDIR=$(mktemp -d "$shm/fuzz.XXXXXX") || exit 1
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

found=$PWD/build/fuzz/found
mkdir -p "$found"
failed=0
for program; do
    target=${program##*/fuzz_}
    grown=build/fuzz/$target seeds=data/fuzz/$target log=build/fuzz/$target.log
    mkdir -p "$grown"
    "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=16 \
        -max_len=8192 -dict="$seeds.dict" -artifact_prefix="$found/$target-" \
        -print_final_stats=1 "$grown" "$seeds" >"$log" 2>&1
    status=$?
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    places=$(sed -n 's/^#.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -n 1)
    line="fuzz/$target: ${runs:-0} files in $seconds s at most, ${places:-0} places reached"
    if [ $status = 0 ]; then
        echo "$line, no finding"
    else
        failed=1
        input=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
        why=$(grep -m 1 -E '^test_fuzz: |runtime error|^==.*ERROR|^train_moe: error' "$log" ||
            tail -n 1 "$log")
        echo "$line, FINDING: ${why:-exit status $status}"
        echo "    ${input:-no file was kept}, and the report in $log"
    fi
done
exit $failed
