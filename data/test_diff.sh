#!/usr/bin/env bash
# test_moe diff: what it prints, what it refuses, and that it finds a wrong operation: one that is
# off, that is NaN in one place, that changes its input, that gives other bits the second time.
# (That the built-in ones are right is for test_moe itself.)
. "$(dirname "$0")/testing.sh"

# From the root, where moe.h is.
diff_() { (cd "$root" && exec "$TEST" diff "$@"); }
untimed() { sed -E 's/ +[0-9]+\.[0-9]+  (ok|FAIL)/ \1/' "$1"; }

# rmsnorm_forward on the CPU; $1 in place of one step of it
rmsnorm() {
    cat <<END
#include "moe.h"
#include <math.h>
void rmsnorm_forward(act_t *out_, stat_t *rstd_, const act_t *inp_, const param_t *weight_, int N,
    int C, double eps) {
    float *out = out_, *rstd = rstd_;
    const float *inp = inp_, *weight = weight_;
    for (int n = 0; n < N; n++) {
        double square = 0;
        for (int c = 0; c < C; c++) square += (double)inp[n * C + c] * inp[n * C + c];
        rstd[n] = (float)(1 / sqrt(square / C + eps));
        for (int c = 0; c < C; c++) out[n * C + c] = inp[n * C + c] * rstd[n] * weight[c];
        $1
    }
}
END
}

prints() {
    run 0 diff_ --op rmsnorm_forward
    [ "$(head -n 1 stdout)" = 'device cpu, dtype fp32, seed 1' ] || no "found: $(head -n 1 stdout)"
    for shape in plain empty-expert all-to-one one-token E64-K8-I32 off-every-tile T1 one-kv-head \
        tiles random-1 random-20; do
        said "^rmsnorm_forward +$shape +[^ ]+ +out +[0-9.e-]+ +[0-9.e-]+ @[0-9]+ +1e-05 .* ok$" \
            stdout
    done
    said '^68 lines, 0 failed$' stdout
    [ "$(wc -l <stdout)" = 71 ] || no "$(wc -l <stdout) lines, expected 71"
}
# The operations are those of struct Backend, all of them.
lists() {
    local op
    run 0 diff_ --list
    [ "$(grep -c '^shape' stdout)" = 34 ] || no "$(grep -c '^shape' stdout) shapes, expected 34"
    for op in $(sed -n '/^typedef struct Backend/,/^} Backend/s/^    void (\*\([a-z_]*\))(.*/\1/p' \
        "$root/moe.h"); do
        case $op in release | to_device | to_host | zero | sync) continue ;; esac
        said "^operation $op$" stdout
    done
    [ "$(grep -c '^operation' stdout)" = 35 ] || no "$(grep -c '^operation' stdout) operations"
}
every_operation() { # but the one that the CPU has not
    local op
    run 0 diff_ --shape B=2,T=3,V=9,C=10,heads=2,kv=1,hd=4,E=3,K=2,I=5
    run 0 diff_ --shape B=1,T=4
    cp stdout all
    run 0 diff_ --list
    for op in $(sed -n 's/^operation //p' stdout); do
        [ $op = params_changed ] || grep -qE "^$op +given " all || no "no line for $op"
    done
}
seeds() {
    run 0 diff_ --op add --seed 3
    untimed stdout >three
    run 0 diff_ --op add --seed 3
    untimed stdout | cmp -s - three || no "seed 3 gives other numbers the second time"
    run 0 diff_ --op add --seed 4
    ! untimed stdout | cmp -s - three || no "seeds 3 and 4 give the same"
}
check diff/prints prints
check diff/lists lists
check diff/every_operation every_operation
check diff/seeds seeds

right() {
    rmsnorm '' >right.c
    run 0 diff_ --with "$PWD/right.c"
    [ "$(grep -c 'right.c .* ok$' stdout)" = 68 ] &&
        [ "$(grep -c 'built-in .* ok$' stdout)" = 68 ] ||
        no "not 68 lines each: $(tail -n 1 stdout)"
    run 0 diff_ --with "$PWD/right.c" --op rmsnorm_forward --shape C=9
}
wrong() { # WHAT IS SAID, STEP
    rmsnorm "$2" >wrong.c
    run 1 diff_ --with "$PWD/wrong.c"
    grep -qE "wrong.c .*FAIL: $1" stdout || no "not said: $1, but: $(grep -m 1 FAIL stdout)"
    ! grep -qE 'built-in .*FAIL' stdout || no "found: $(grep -m 1 'built-in .*FAIL' stdout)"
    grep -qE '^[0-9]+ lines, [1-9][0-9]* failed$' stdout || no "found: $(tail -n 1 stdout)"
}
check diff/with_right right
check diff/with_wrong wrong 'beyond its limit' 'if (n == N / 2) out[n * C] *= 1.01f;'
check diff/with_nan wrong 'not a number' 'if (n == 7) out[n * C + C - 1] = NAN;'
check diff/with_not_written wrong 'not a number' 'if (n == N - 1) memset(&rstd[n], 0xFF, 4);'
check diff/with_changed_input wrong 'changed weight' '((float *)(uintptr_t)weight)[0] += 1e-3f;'
check diff/with_other_bits wrong 'a second run gives other bits' \
    'static float drift; rstd[n] *= 1 + (drift += 2e-7f);'

stops() {
    rmsnorm 'if (n == N - 1) out[n * C] *= 1.01f;' >wrong.c
    run 1 diff_ --with "$PWD/wrong.c" --stop
    [ "$(grep -c FAIL: stdout)" = 1 ] || no "$(grep -c FAIL: stdout) failures, expected 1"
    said '^[0-9]+ lines, 1 failed$' stdout
}
check diff/stop stops

not_to_be_had() {
    export TMPDIR=$PWD/tmp
    mkdir tmp
    run 2 diff_ --with "$PWD/none.c"
    refused 'none.c'
    echo 'int other(void); int other(void) { return 1; }' >none.c
    run 2 diff_ --with "$PWD/none.c"
    refused 'none.c' 'exports no operation'
    rmsnorm '' >two.c
    echo 'void add(void *o, void *a, void *b, size_t n) { *(char *)o = !a + !b + !n; }' >>two.c
    run 2 diff_ --with "$PWD/two.c"
    refused 'add' 'rmsnorm_forward'
    rmsnorm 'this is not C;' >broken.c
    run 2 diff_ --with "$PWD/broken.c"
    said 'broken.c:.*error'
    [ "$(grep -c '^train_moe: error: .*broken.c.*does not compile' stderr)" = 1 ] ||
        no "not said in one line"
    rmsnorm '' >right.c
    run 2 diff_ --with "$PWD/right.c" --op add
    refused 'add' 'rmsnorm_forward'
    [ -z "$(ls tmp)" ] || no "left behind: $(ls tmp)"
}
check diff/with_refused not_to_be_had

bad_flags() {
    local line
    while read -r line; do
        run 2 diff_ ${line%%|*}
        refused "${line#*|}"
    done <<'END'
--op nothing|expected an operation.*'nothing'
--op|expected a value after '--op'
--dtype fp16|expected fp32 or bf16, found 'fp16'
--dtype bf16|expected fp32.*cpu.*found bf16
--device tpu|expected cpu, cuda or emulated, found 'tpu'
--seed -1|--seed.*found '-1'
--seed x|--seed.*found 'x'
--seed 4294967296|--seed.*found '4294967296'
--shape Q=3|expected KEY=VAL.*found 'Q=3'
--shape C|expected KEY=VAL.*found 'C'
--shape C=0|expected C from 1.*found '0'
--shape C=9x|expected C from 1.*found '9x'
--shape C=|expected C from 1.*found ''
--shape hd=5|even hd, found 5
--shape heads=4,kv=3|multiple of kv, found 4 and 3
--shape E=2,K=3|K of at most E = 2, found 3
--unknown|found '--unknown'
rmsnorm_forward|expected a flag, found 'rmsnorm_forward'
--op params_changed|cpu has no params_changed
END
}
check diff/bad_flags bad_flags

# A device that this build or machine has not: one line says so.
other_device() {
    local status=0
    diff_ --device "$1" --op add --shape B=1,T=2 </dev/null >stdout 2>stderr || status=$?
    case $status in
        0) said "^device $1, dtype fp32, seed 1$" stdout ;;
        2) refused "--device $1" ;;
        *) no "exit status $status" ;;
    esac
}
check diff/emulated other_device emulated
check diff/cuda other_device cuda

# The README's worked example, as it stands there; and the fault that it tells of.
example() {
    local from command
    "$TEST" diff --device emulated --op add --shape B=1,T=2 >stdout 2>stderr </dev/null ||
        { skip 'no emulated device in this build'; return; }
    from=$(grep -n '^    // add.cu$' "$root/README.md" | cut -d: -f1)
    tail -n "+$((from + 1))" "$root/README.md" | sed -n '/^    /!q; s/^    //p' >add.cu
    command=$(sed -n 's|^    ./test_moe \(diff .*--with add.cu.*\)|\1|p' "$root/README.md")
    [ -n "$command" ] || no 'no command in the README'
    run 0 diff_ ${command#diff } --with "$PWD/add.cu"
    [ "$(grep -c '^add .* add.cu .* ok$' stdout)" = 3 ] || no "found: $(tail -n 2 stdout)"
    said '^6 lines, 0 failed$' stdout
    sed 's/i < n/i <= n/' add.cu >wrong.cu
    cmp -s add.cu wrong.cu && no 'the README has another condition'
    run 1 diff_ ${command#diff } --with "$PWD/wrong.cu"
    said 'wrong.cu .*FAIL: written beyond out' stdout
}
check diff/readme_example example
