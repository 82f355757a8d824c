#!/usr/bin/env bash
# bench: its tables, as text and as JSON, have every operation and every size; nothing is said of how
# fast. data/worth.sh: goes on where it stopped, and adds up what it has.
. "$(dirname "$0")/testing.sh"

model=(--layers 2 --d-model 16 --heads 2 --kv-heads 1 --head-dim 8 --experts 4 --topk 2 --d-expert 16
    --seq 16 --batch 2)
steps='zero embedding_forward embedding_backward rmsnorm_forward residual_rmsnorm_forward
    rmsnorm_backward linear_forward linear_backward qk_rope_forward qk_rope_backward
    attention_forward attention_backward router_forward router_backward plan_topk expert_up_forward
    expert_down_forward expert_down_backward expert_up_backward classifier reduce_loss grad_norm
    update'

# In JSON: every KEY stands before a number above 0, as often as said.
positive() { # KEY COUNT
    [ "$(grep -cE "\"$1\": ([1-9][0-9]*|0)(\.[0-9]+)?(e[-+]?[0-9]+)?,?$" stdout)" = "$2" ] ||
        no "not $2 numbers $1"
    ! grep -E "\"$1\": -?0(\.0+)?,?$" stdout || no "$1 is 0"
}
plain() {
    local op
    run 0 "$TRAIN" bench "${model[@]}" --recompute 1 --threads 2
    for op in $steps; do
        grep -qE "^$op +[1-9][0-9]* +[0-9.]+ +[0-9.]+% " stdout || no "no line for $op"
    done
    said '^expert products +[0-9.]+ +[0-9.]+% +[0-9.]+ +[0-9.]+%$' stdout
    # which is between the slowest and the fastest of them
    awk '/^expert_/ { x = $NF + 0; if (!n++ || x < low) low = x; if (x > high) high = x }
        /^expert products/ { x = $NF + 0; seen = n == 4 && low < high && x >= low && x <= high } END { exit !seen }' stdout ||
        no "not between: $(grep '^expert' stdout)"
    said '^peak +[1-9]' stdout
    said '^bandwidth +[0-9.]+ GB/s' stdout
    said '^step +forward [0-9.]+ ms, backward [0-9.]+ ms, update [0-9.]+ ms' stdout
    said '^training .* tok/s' stdout
    ! grep -qE '\b(nan|inf)\b| -[0-9]' stdout || no "found $(grep -m 1 -E '\b(nan|inf)\b| -[0-9]' stdout)"
    ! grep -q 'update_bias\|plan_select' stdout || no "an operation that was not called"
    # the sigmoid router and rounding call two more; SGD and no update of moments as well
    run 0 "$TRAIN" bench "${model[@]}" --router sigmoid --routing round --tile 4 --optimizer sgd
    for op in update_bias plan_select; do said "^$op" stdout; done
    run 0 "$TRAIN" bench "${model[@]:0:10}" --experts 1 --seq 16 --batch 2
    ! grep -q '^router' stdout || no "a dense model has a router"
}
json() {
    run 0 "$TRAIN" bench "${model[@]}" --json
    [ "$(head -c 1 stdout)$(tail -c 2 stdout)" = '{}' ] || no "more than JSON"
    positive ms "$(wc -w <<<"$steps")"
    for key in peak_gflops bandwidth_gbs product_size product_gflops tok_per_s forward_ms backward_ms \
        update_ms; do
        positive $key 1
    done
    for op in $steps; do grep -q "\"name\": \"$op\"" stdout || no "no $op"; done
}
tables() {
    run 0 "$TRAIN" bench "${model[@]}" --layers 1 --seq 256 --tax --growth --json
    positive ratio 10
    positive ratio_forward_backward 10
    for n in 8 16 32 64 128; do
        [ "$(grep -c "\"experts\": $n,$" stdout)" = 2 ] || no "no pair of rows for $n experts"
    done
    for n in 'tokens a step' layers width experts; do grep -q "\"of\": \"$n\"" stdout || no "no $n"; done
    positive us_per_token 16
}
check bench/text plain
check bench/json json
on_san && echo "skip bench/tables: minutes under a sanitizer" || check bench/tables tables

refused_bench() {
    run 2 "$TRAIN" bench "${model[@]}" --batch 10000000
    refused '--batch'
    run 2 "$TRAIN" bench "${model[@]}" --tax=yes
    refused '--tax'
    run 2 "$TRAIN" bench "${model[@]}" --json 1
    refused "'1'"
}
check bench/refuses refused_bench

text 3000 >"$work/text"
worth() {
    env WORTH="$PWD/w.tsv" BUDGETS='0.3 0.6' RATES="${RATES:-1e-3 4e-3}" SEEDS='1 2' TEXT="$work/text" \
        TRAIN="$TRAIN" SHAPE='--layers 1 --d-model 16 --heads 2 --kv-heads 1 --head-dim 8 --seq 16 --batch 2' \
        "$@" bash "$root/data/worth.sh" ${table:+table}
}
finals() { awk -F '\t' -v w="$1" '$1 == w && $7 == $8' w.tsv | wc -l; }
# Where the last point of a curve is drawn: x, y (down). The very last is that of the legend.
ends() {
    awk -v of="<title>$1</title>" 'index($0, "<title>") { on = index($0, of) } on' w.svg |
        grep -oE "translate\([0-9.]+,[0-9.]+\) scale" | tail -n 2 | head -n 1 | sed -E 's/.*\(([0-9.]+),([0-9.]+)\).*/\1 \2/'
}
goes_on() {
    run 0 worth
    [ "$(finals rate)" = 6 ] && [ "$(finals run)" = 12 ] ||
        no "$(finals rate) and $(finals run) runs, not 6 and 12"
    [ "$(grep -c '^| dense\|^| 8-2\|^| 64-8' stdout)" = 6 ] || no "a table of other lines"
    grep -c '^|' stdout | grep -qx 8 || no "not 8 lines of a table"
    # the best rate of each model is the one that its runs have
    awk -F '\t' '$1 == "rate" && $7 == $8 && (!($2 in best) || $11 < best[$2]) { best[$2] = $11; rate[$2] = $3 }
        $1 == "run" { used[$2, $3] = 1 }
        END { for (k in used) { split(k, p, SUBSEP); if (rate[p[1]] != p[2]) bad = 1 } exit bad }' w.tsv ||
        no "runs with another rate than the best"
    [ "$(awk -F '\t' '$1 == "run" { print $5; exit }' w.tsv)" = 0.6 ] || no "the largest budget is not first"
    # the run that chose a rate is not made again: its rows are there twice, times and all
    awk -F '\t' '$1 == "run" && $4 == 1 && $5 == 0.3' w.tsv | sed 's/^run/rate/' >twice
    [ -s twice ] && ! grep -vxFf w.tsv twice || no "runs that are not those that chose the rate"
    cp w.tsv whole
    run 0 worth
    same w.tsv whole
    # stopped before the last run: that one alone is made again, to the same losses
    awk -F '\t' -v OFS='\t' '{ k = $1 FS $2 FS $3 FS $4 FS $5 } { line[NR] = $0; key[NR] = k }
        END { for (i = 1; i <= NR; i++) if (key[i] != key[NR]) print line[i] }' whole >w.tsv
    run 0 worth
    cut -f 1-9,11 w.tsv >again
    cut -f 1-9,11 whole >first
    same again first
    run 2 env SHAPE='--layers 2' WORTH="$PWD/w.tsv" TEXT="$work/text" TRAIN="$TRAIN" bash "$root/data/worth.sh"
    said 'another shape \(--layers 1'
    # a rate that is not asked for is not chosen, however good
    cp whole w.tsv
    local worse=4e-3
    ! grep -q $'^run\tdense\t4e-3' whole || worse=1e-3
    RATES=$worse run 0 worth
    awk -F '\t' -v r=$worse '$1 == "run" && $2 == "dense" && $3 == r && $7 == $8' w.tsv | wc -l | grep -qx 4 ||
        no "another rate than $worse, which alone was asked for"
    cp whole w.tsv
    # the numbers of the table, from runs that are known
    printf '%s\t' speed dense - - - 0.1 - - - - x >w.tsv
    printf '\n' >>w.tsv
    for row in 'run dense 1 1 0.6 0.1 6 3 0.3 0 3.0' 'run dense 1 1 0.6 0.1 6 6 0.6 0 2.0' \
        'run 8-2 1 1 0.6 0.1 6 3 0.3 0 2.5' 'run 8-2 1 1 0.6 0.1 6 6 0.6 0 1.5'; do
        tr ' ' '\t' <<<"$row" >>w.tsv
    done
    table=1 run 0 worth
    # half-way between 0.3 s and 0.6 s the loss is 2.0: 0.45 of 0.6
    grep -q '^| 8-2 | 0.6 s | 1 | 1 | 6 | 0.1000 | 1.5000: 1.5000 | 0.75 |$' stdout ||
        no "found: $(grep '^| 8-2' stdout)"
    # the picture: both end at 0.6 s, the mixture lower; the line is where the dense one ends
    if command -v gnuplot >/dev/null; then
        ! grep -iE 'warning|error' stderr || no "gnuplot: $(grep -iEm 1 'warning|error' stderr)"
        ends dense >dense
        ends 8-2 >mixture
        paste dense mixture | awk '{ exit !(NF == 4 && $1 == $3 && $4 > $2) }' ||
            no "ends drawn at $(cat dense) and $(cat mixture)"
        sed -nE "s/.*stroke='rgb[^']*' +d='M[0-9.]+,([0-9.]+) L[0-9.]+,\1  '.*/\1/p" w.svg |
            awk -v y="$(cut -d ' ' -f 2 dense)" '{ d = $1 - y } d * d < 0.01 { seen = 1 } END { exit !seen }' ||
            no "no line at the dense model's end, $(cat dense)"
    fi
    sed -i 's/\tx\t*$/\tanother processor/' w.tsv
    run 2 worth
    said 'another processor'
}
if [ -r /proc/cpuinfo ]; then check worth/goes_on goes_on; else echo "skip worth: no /proc/cpuinfo"; fi

# data/peer.sh with programs that only say a speed: who is best, and the ratio to it.
peer() {
    cat >ours <<'END'
#!/bin/sh
echo '{"x": 1, "step": {"tok_per_s": 1000.5, "y": 2}}'
END
    cat >python <<'END'
#!/bin/sh
case "$*" in
    *version*) echo 9.9 ;;
    *import*) ;;
    *loop*) exit 1 ;;
    *compile*) echo '{"tok_per_s": 400.2}' ;;
    *) echo '{"tok_per_s": 300}' ;;
esac
END
    chmod +x ours python
    run 0 env PYTHON="$PWD/python" TRAIN="$PWD/ours" ROUNDS=2 SHAPES='8,2,512' \
        WAYS='sorted sorted,--compile loop' bash "$root/data/peer.sh"
    grep -q '^| 8, 2, 512 | 1000 | sorted 300; sorted, compile 400; loop fails | 2.50 |$' stdout ||
        no "found: $(cat stdout)"
    grep -q 'PyTorch 9.9' stdout || no "no version"
    run 2 env PYTHON=false TRAIN="$PWD/ours" bash "$root/data/peer.sh"
    said 'PYTHON='
}
check bench/peer peer
