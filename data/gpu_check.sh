#!/usr/bin/env bash
# What `make gpu-check` runs on a machine with a GPU; under five minutes, each step with a limit of its
# own. Without arguments it only says whether there is a GPU: exit status 0, or 2 and one line. With
# make's words on what is built in ("... CUDA on (sm_90)") it runs, and says of each step ok or FAIL:
#
#     diff        every operation against the double reference, fp32 and bf16
#     parity      training runs beside the CPU's, and what must be the same bits; both types
#     devices     two runs, a resumed run, batches of another size: the same bits (data/test_devices.sh)
#     sanitizer   compute-sanitizer, where there is one: memory, races and barriers of every
#                 operation at one shape, of several tiles and off their sizes
#     bench       every operation's time, fp32 and bf16, and cuBLAS beside it; shown as it comes
#
# Exit status 1 if a step failed. TRAIN and TEST name the programs.
. "$(dirname "$0")/testing.sh"

gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
[ "$gpu" ] || { echo "gpu-check: no GPU here: nvidia-smi finds none" >&2; exit 2; }
[ $# != 0 ] || exit 0
case $1 in
    *'CUDA on'*) ;;
    *) echo "gpu-check: built without CUDA: $1" >&2; exit 2 ;;
esac
echo "gpu-check: $gpu; $1"

started=$SECONDS failed=0
summary=()
step() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 at=$SECONDS status=0
    shift 2
    timeout "$limit" "$@" >"$work/out" 2>"$work/err" </dev/null || status=$?
    [ $status != 0 ] || ! grep -q '^FAIL ' "$work/out" || status=1 # scripts leave the count to us
    case $status in
        0) summary+=("$(printf '%-24s ok    %4d s' "$name" $((SECONDS - at)))") ;;
        124) summary+=("$(printf '%-24s FAIL  %4d s  still running' "$name" "$limit")") ;;
        *) summary+=("$(printf '%-24s FAIL  %4d s  status %d: %s' "$name" $((SECONDS - at)) $status \
            "$(grep -hE '^FAIL|FAIL$|error:|ERROR|failed' "$work/out" "$work/err" |
                head -n 1)")") ;;
    esac
    [ $status = 0 ] || {
        failed=$((failed + 1))
        tail -n 30 "$work/out" "$work/err" | sed 's/^/    | /'
    }
}

for dtype in fp32 bf16; do
    step diff/$dtype 45 "$TEST" diff --device cuda --dtype $dtype
done
step parity 30 "$TEST" parity --device cuda
step devices 60 env DEVICE=cuda bash "$(dirname "$0")/test_devices.sh"
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck; do
        step sanitizer/$tool 25 compute-sanitizer --tool $tool --error-exitcode 9 \
            "$TEST" diff --device cuda --dtype bf16 \
            --shape B=2,T=100,V=130,C=104,heads=3,kv=1,hd=40,E=3,K=2,I=104
    done
else
    summary+=("sanitizer                skipped: no compute-sanitizer in the PATH")
fi
for dtype in fp32 bf16; do
    step bench/$dtype 20 "$TRAIN" bench --preset small --device cuda --dtype $dtype
    echo
    cat "$work/out"
done
echo
printf '%s\n' "${summary[@]}"
echo "gpu-check: ${#summary[@]} steps, $failed failed, $((SECONDS - started)) s on $gpu"
[ $failed = 0 ]
