#!/usr/bin/env bash
# lane: builds
# Several ranks: test_comm under mpirun, and what must happen when a rank ends, hangs or is killed.
# One machine with few cores is enough; as root too.
. "$(dirname "$0")/testing.sh"
COMM=${TEST%/*}/test_comm

mpi_settings

# A launcher, but no MPI in the program: it must not run as if it were alone.
no_mpi() { # PROGRAM
    run 0 "$1"
    ! grep -qE '^FAIL' stdout || no "$(grep -m 1 '^FAIL' stdout)"
    grep -q '^ok alone/no_mpi' stdout || no "alone/no_mpi was not tried"
    run 2 env OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 "$1"
    refused 'built without MPI'
    run 2 env PMI_RANK=1 "$1"
    refused 'built without MPI'
    run 0 env PMI_RANK=0 PMI_SIZE=1 "$1" shares
}
without() { # a build that leaves MPI out
    local folder
    cd "$root" || exit 1
    folder=$($MAKE --no-print-directory -s --eval='folder: ; @echo $(B)' folder CC="$CC" \
        SAN="$SAN" MPI=0 2>&1) || skip "$(tail -n 1 <<<"$folder")"
    $MAKE --no-print-directory "$folder/test_comm" CC="$CC" SAN="$SAN" MPI=0 \
        >"$work/make.log" 2>&1 ||
        no "does not build: $(grep -E 'error:|undefined reference' "$work/make.log" | head -n 1)"
    cd "$work/check" || exit 1
    no_mpi "$root/$folder/test_comm"
}

if [ "$("$COMM" build)" != MPI ]; then
    check ranks/without_mpi no_mpi "$COMM"
    echo "skip ranks: built without MPI (Debian: apt-get install libopenmpi-dev openmpi-bin)"
    exit 0
fi
check ranks/without_mpi without
if ! command -v mpirun >/dev/null; then
    echo "skip ranks: no mpirun here (Debian, Ubuntu: apt-get install openmpi-bin)"
    exit 0
fi

# Every check of test_comm, under its own names.
every() { # RANKS
    local status=0
    timeout 300 mpirun -n "$1" "$COMM" </dev/null >"$work/out" 2>"$work/err" || status=$?
    grep -E '^(ok|FAIL|skip) ' "$work/out"
    [ $status = 0 ] || grep -q '^FAIL ' "$work/out" || {
        echo "FAIL ranks_$1: exit status $status:" \
            "$(grep -m 1 -E 'Sanitizer|runtime error:|: error: ' "$work/err")"
    }
}
for n in 2 3 4; do every $n; done

# All ranks and all runs have the same bits, however the messages are cut.
sums() {
    local n way
    for n in 2 4; do
        for way in '0 0' '0 0' '1000 4096' '100000 64' '0 70000'; do
            run 0 timeout 60 mpirun -n "$n" "$COMM" sums $way
            [ "$(wc -l <stdout)" = "$n" ] || no "$(wc -l <stdout) of $n ranks said anything"
            cat stdout >>"bits.$n"
        done
        [ "$(sort -u "bits.$n" | wc -l)" = 1 ] ||
            no "$n ranks: $(sort "bits.$n" | uniq -c | tr '\n' ' ')"
    done
    [ "$(head -n 1 bits.2)" != "$(head -n 1 bits.4)" ] || no "2 and 4 ranks have the same sums"
}
check ranks/same_bits sums

# One rank of three fails; all end, within SECONDS, with this status (an extended pattern, for
# signals are told in several ways). PATTERN is in stderr.
ends() { # HOW RANK STATUS SECONDS PATTERN
    local how=$1 rank=$2 status=0 started=$SECONDS
    cp "$COMM" "rank_$how" # a name to look for
    timeout 60 mpirun -n 3 "./rank_$how" how "$how" "$rank" </dev/null >stdout 2>stderr || status=$?
    [ $status != 124 ] || no "still there after 60 seconds"
    [[ $status =~ ^($3)$ ]] || no "exit status $status, expected $3: $(reason)"
    [ $((SECONDS - started)) -le "$4" ] || no "it took $((SECONDS - started)) seconds"
    [ ! "$5" ] || said "$5"
    ! grep -m 1 -E 'Sanitizer|runtime error:' stderr || exit 1
    gone "rank_$how" || no "a rank is still there"
}
check ranks/fine ends close 0 0 20 ''
for rank in 0 1 2; do
    check ranks/die_$rank ends die $rank 1 20 "train_moe: error: rank $rank cannot open its file"
done
check ranks/die_aborts ends die 1 1 20 'MPI_Abort: status 1' # not only the launcher's kindness
check ranks/user_error ends user 1 2 20 'train_moe: error: rank 1 does not like its flags'
check ranks/exit_before_close ends exit 2 1 20 'error: a rank left its group'
check ranks/ends_at_once ends _exit 0 '[1-9][0-9]*' 20 ''
check ranks/killed_0 ends kill 0 '137|9' 20 ''
check ranks/killed_2 ends kill 2 '137|9' 20 ''
# (in a build that compares counts first, that is where it waits)
check ranks/hangs ends hang 1 1 25 \
    'error: rank [02] waited 2 s in (all-to-all|setup) for rank [012]'
check ranks/other_counts ends counts 1 1 20 'rank 1 sends 4 rows to rank 2, which expects 5'
check ranks/too_short ends short 1 1 20 'rank 2: all-to-all: rank 1 sent 16 bytes where 20 were'
check ranks/too_long ends long 0 1 20 'rank 1: all-to-all: rank 0 sent more than the 20 bytes'
check ranks/finished_twice ends twice 1 1 20 'internal: .* finished twice'
check ranks/too_many ends many 2 1 20 'internal: more than 64 operations'

# Started by the launcher of one MPI, built with another: every rank would think it is alone.
stranger() {
    mpirun --version 2>/dev/null | grep -q 'Open MPI' || skip "made for Open MPI"
    run 2 env PMI_RANK=0 PMI_SIZE=2 timeout 60 "$COMM" sums 0 0
    said 'started 2 ranks, but MPI sees 1: use the mpirun of the MPI'
}
check ranks/another_launcher stranger
