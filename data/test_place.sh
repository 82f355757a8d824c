#!/usr/bin/env bash
# Recording of routing, and placements made from it: routing.jsonl is what the run's own loads say, a
# resumed run records no step twice, and what `train_moe place` prints is counted again here, from
# the files alone.
. "$(dirname "$0")/testing.sh"

text 600 >"$work/text"
tiny=(--input "$work/text" --layers 3 --d-model 16 --heads 2 --kv-heads 1 --experts 8 --topk 2
    --d-expert 8 --seq 32 --batch 4 --warmup 2 --schedule constant --eval-batches 2 --aux-loss 0
    --sample-every 0 --threads 1)
train() { run 0 "$TRAIN" "${tiny[@]}" "$@"; }

# STEP LAYER EXPERT..., a recorded row a line
rows() {
    awk '{
        match($0, /^\{"step":[0-9]+/)
        step = substr($0, 9, RLENGTH - 8)
        n = split($0, layer, /\{"layer":/)
        for (i = 2; i <= n; i++) {
            l = layer[i] + 0
            sub(/^[0-9]+,"topk":\[\[/, "", layer[i])
            sub(/\]\].*/, "", layer[i])
            m = split(layer[i], row, /\],\[/)
            for (j = 1; j <= m; j++) { gsub(",", " ", row[j]); print step, l, row[j] }
        }
    }' "$1/routing.jsonl"
}
# STEP INDEX COUNT..., the loads of a step and MoE layer a line
loads() {
    sed -nE 's/^\{"step":([0-9]+),.*"load":\[\[([^a-z]*)\]\].*/\1 \2/p' "$1/metrics.jsonl" |
        awk '{
            n = split($2, layer, /\],\[/)
            for (i = 1; i <= n; i++) { gsub(",", " ", layer[i]); print $1, i - 1, layer[i] }
        }'
}
# LAYER EXPERT RANK, of a placement
placed() {
    sed -nE 's/^  \{"layer": ([0-9]+), "ranks": \[\[(.*)\]\]\},?$/\1 \2/p' "$1" | awk '{
        l = $1
        sub(/^[0-9]+ /, "")
        n = split($0, rank, /\], \[/)
        for (r = 1; r <= n; r++) {
            m = split(rank[r], e, ", ")
            for (i = 1; i <= m; i++) print l, e[i], r - 1
        }
    }'
}

# ---- recording -----------------------------------------------------------------------------------
# A step of one micro-batch of at most 256 rows is recorded whole: its choices are the step's loads.
recorded_is_the_load() { # FIRST MOE LAYER, and flags
    train --out o --steps 9 --routing-every 3 --eval-every 1 "${@:2}"
    [ "$(rows o | cut -d ' ' -f 1 | uniq | tr '\n' ' ')" = "3 6 9 " ] ||
        no "recorded: $(rows o | cut -d ' ' -f 1 | uniq | tr '\n' ' ')"
    rows o >rows
    loads o | awk -v first="$1" '
        NR == FNR { here[$1, $2]++; for (k = 3; k <= NF; k++) n[$1, $2, $k]++; next }
        $1 % 3 { next }
        {
            tried++
            if (here[$1, $2 + first] != 128) { print here[$1, $2 + first] " rows"; exit }
            for (e = 3; e <= NF; e++) if ($e != n[$1, $2 + first, e - 3] + 0) {
                print "step " $1 ", layer " $2 + first ", expert " e - 3 ": load " $e \
                    ", recorded " n[$1, $2 + first, e - 3] + 0; exit
            }
        }
        END { if (tried != 3 * (3 - first)) print tried " layers and steps" }' rows - >why
    [ ! -s why ] || no "$(head -n 1 why)"
}
check place/recorded_is_the_load recorded_is_the_load 0
check place/recorded_with_recompute recorded_is_the_load 0 --recompute 2
check place/recorded_after_a_dense_layer recorded_is_the_load 1 --dense-layers 1 --router sigmoid

# Of more rows than 256 every second one: in the first step the first half of a batch of 16 are the
# rows of a batch of 8, whatever the batch.
rows_are_spaced() {
    train --out a --steps 1 --batch 8 --routing-every 1
    train --out b --steps 1 --batch 16 --routing-every 1
    rows a | awk '{ n[$2]++ } n[$2] % 2' >want
    rows b | awk '++n[$2] <= 128' >got
    [ "$(wc -l <want)" = 384 ] && [ "$(rows b | wc -l)" = 768 ] || no "$(rows b | wc -l) rows"
    same want got
    # the last of two micro-batches
    train --out c --steps 1 --batch 4 --total-batch 256 --routing-every 1
    rows a | awk '++n[$2] > 128' >want
    rows c >got
    same want got
}
check place/rows_are_spaced rows_are_spaced

resumed() {
    train --out full --steps 12 --save-every 4 --keep 0 --eval-every 5 --routing-every 2
    [ "$(wc -l <full/routing.jsonl)" = 6 ] || no "$(wc -l <full/routing.jsonl) lines"
    local n
    for n in 4 8; do # stopped after step 12, and while a line was written; only step n was saved
        rm -rf o
        cp -a full o
        for s in $(seq $((n + 4)) 4 12); do rm -r "o/$(printf step_%08d "$s")"; done
        ln -sfn "$(printf step_%08d $n)" o/latest
        ln -sfn "$(printf step_%08d $n)" o/best
        head -c 99 full/routing.jsonl >>o/routing.jsonl
        run 0 "$TRAIN" --resume o
        same full/routing.jsonl o/routing.jsonl "resumed at step $n:"
    done
    run 0 "$TRAIN" --resume o --steps 15 --routing-every 1
    rows o | cut -d ' ' -f 1 | uniq | tr '\n' ' ' >steps
    [ "$(<steps)" = "2 4 6 8 10 12 13 14 15 " ] || no "recorded: $(<steps)"
    # without recording, what is later than the checkpoint goes all the same
    rm -r o/step_00000015 o/step_0000001[34] 2>/dev/null
    ln -sfn step_00000012 o/latest
    run 0 "$TRAIN" --resume o --steps 14 --routing-every 0
    same full/routing.jsonl o/routing.jsonl "without recording:"
    # a new run in that folder has none of it
    train --out o --overwrite --steps 2
    [ ! -e o/routing.jsonl ] || no "the routing of another run is there"
}
check place/resumed resumed

# ---- placing -------------------------------------------------------------------------------------
# What place printed for RANKS and NODES is what the files say, counted token by token and rank by rank.
count_again() { # RUN PLACEMENT RANKS NODES FIRST-MOE-LAYER
    placed "$2" >placed
    loads "$1" | tail -n $((6 * (3 - $5))) >loads # the recent half of 12 steps
    rows "$1" | awk '$1 > 6' >recent
    awk -v P="$3" -v M="$4" -v first="$5" -v E=8 '
        function off(what, x, y) {
            if (x == "" || (x - y)^2 > 4e-9) { print what ": printed " x ", counted " y; exit }
        }
        FILENAME == "placed" { at[1, $1, $2] = $3; n[$1, $3]++; next }
        FILENAME == "loads" {
            for (e = 0; e < E; e++) {
                load[0, $2 + first, int(e * P / E)] += $(e + 3)
                load[1, $2 + first, at[1, $2 + first, e]] += $(e + 3)
                all[$2 + first] += $(e + 3)
            }
            next
        }
        FILENAME == "recent" {
            rows++
            for (w = 0; w < 2; w++) for (from = 0; from < P; from++) {
                split("", to); split("", node)
                for (k = 3; k <= NF; k++) {
                    r = w ? at[1, $2, $k] : int($k * P / E); m = int(r * M / P)
                    other = r != from; far = m != int(from * M / P)
                    sent["alltoall ranks", w] += other
                    sent["dedup ranks", w] += other && !(r in to)
                    sent["alltoall nodes", w] += far
                    sent["dedup nodes", w] += far && !(r in to)
                    sent["node nodes", w] += far && !(m in node)
                    to[r]; node[m]
                }
            }
            next
        }
        $1 == "layer" || $1 == "all" { for (w = 0; w < 2; w++) {
            if ($1 == "all") { off("all layers", $(3 + w), worst[w] / mean); continue }
            most = 0
            for (r = 0; r < P; r++) if (load[w, $2, r] > most) most = load[w, $2, r]
            if (w) for (r = 0; r < P; r++) if (n[$2, r] != E / P) { print n[$2, r] " experts"; exit }
            off("layer " $2, $(3 + w), most * P / all[$2])
            worst[w] += most
            if (w) mean += all[$2] / P
            seen["layer"]++
        } }
        / to other (ranks|nodes) / {
            key = $1 " " ($1 == "node" ? $5 : $4)
            f = NF - 3
            for (w = 0; w < 2; w++) {
                x = sent[key, w] / rows / P
                off(key, $(f + w), x)
                if (($(f + 2 + w) - x * 64)^2 > 0.0026) { print key ": " $(f + 2 + w) " bytes"; exit }
            }
            seen["sent"]++
        }
        END {
            if (seen["layer"] != 2 * (3 - first) || seen["sent"] != (M > 1 ? 5 : 2))
                print seen["layer"] " layers, " seen["sent"] " lines of rows"
        }' placed loads recent stdout >why
    [ ! -s why ] || no "$3 ranks, $4 nodes: $(head -n 1 why)"
}
prints() { # FIRST-MOE-LAYER, and flags
    local ranks nodes
    train --out o --steps 12 --routing-every 1 "${@:2}"
    while read -r ranks nodes; do
        run 0 "$TRAIN" place --log o --ranks $ranks --nodes $nodes
        said '^loads: the recent half of the 12 steps recorded in o/metrics.jsonl, 7 to 12$' stdout
        said '^co-selections: 6 steps from the recent half of the 12 .*, 7 to 12, 768 tokens$' stdout
        ! grep . stderr || no "said: $(<stderr)"
        count_again o o/placement.json $ranks $nodes "$1"
        awk '/^(layer|all) / && $4 > $3 { exit 1 }' stdout || no "worse than index order"
        cp o/placement.json first
        run 0 "$TRAIN" place --log o --ranks $ranks --nodes $nodes --out again
        same first again "the same twice:"
    done <<<'2 1
4 1
4 2
8 4
1 1'
    ls o | grep -q tmp && no "left behind: $(ls o)"
    mv o/routing.jsonl gone
    run 0 "$TRAIN" place --log o --ranks 4
    said '^co-selections: no o/routing.jsonl, so loads alone count; train --routing-every N' stdout
    ! grep -E 'token|rows' stdout || no "rows without routing"
}
check place/prints prints 0
check place/prints_after_a_dense_layer prints 1 --dense-layers 1

# Experts e and e + 4 are made the two of every token, with equal loads: each pair is on one rank.
pairs() {
    local l
    train --out o --steps 1 --routing-every 1
    awk 'BEGIN {
        printf "{\"step\":1,\"layers\":["
        for (l = 0; l < 3; l++) {
            printf "%s{\"layer\":%d,\"topk\":[", l ? "," : "", l
            for (i = 0; i < 40; i++) printf "%s[%d,%d]", i ? "," : "", i % 4, i % 4 + 4
            printf "]}"
        }
        print "]}"
    }' >o/routing.jsonl
    sed -i -E 's/"load":\[\[.*\]\]/"load":[[5,5,5,5,5,5,5,5],[5,5,5,5,5,5,5,5],[5,5,5,5,5,5,5,5]]/' \
        o/metrics.jsonl
    run 0 "$TRAIN" place --log o --ranks 4 --nodes 2
    placed o/placement.json >placed
    awk '{ rank[$1, $2] = $3 } END { for (l = 0; l < 3; l++) for (e = 0; e < 4; e++)
        if (rank[l, e] != rank[l, e + 4]) exit 1 }' placed || no "a pair is apart: $(<o/placement.json)"
    said '^dedup +to other ranks +1.5000 +0.7500 +96.0 +48.0$' stdout
}
check place/pairs pairs
