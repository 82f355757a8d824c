#!/usr/bin/env bash
# Experts in training: a router that sends every token to two of eight experts is balanced again by
# the selection bias, by the balance loss, and by neither if there is neither, which is said. And
# what token rounding, capacity and upcycling do to a run, and what `info --tsv` shows of it.
. "$(dirname "$0")/testing.sh"

text 1500 >"$work/text"
model=(--layers 2 --d-model 32 --heads 2 --kv-heads 1 --experts 8 --topk 2 --d-expert 32)
data=(--input "$work/text" --seq 32 --batch 64 --warmup 10 --eval-batches 8 --threads 1)
train() { run 0 "$TRAIN" "${model[@]}" "${data[@]}" "$@"; }

# ---- a collapsed router --------------------------------------------------------------------------
put() { # FILE OFFSET, and the bytes of a float32 as printf takes them
    printf "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}
pull='\x00\x00\x80\x3f' small='\x8f\xc2\x75\x3d' zero='\0\0\0\0' # 1.0, 0.06, 0

# Every token's first channel is large, and the routers' rows 0 and 1 look at nothing else: all
# tokens go to experts 0 and 1, by far.
collapsed() { # FOLDER, and the flags of the model
    local file l i at
    train --out "$1" --steps 1 --lr 0 --min-lr 0 --eval-every 0 "${@:2}"
    file=$(cd "$1/latest" && pwd -P)/model.safetensors
    at=$(tensor_at "$file" model.embed_tokens.weight) || no "$at"
    at=${at% *}
    for i in {0..255}; do put "$file" $((at + i * 32 * 4)) "$small"; done
    for l in 0 1; do
        at=$(tensor_at "$file" model.layers.$l.mlp.gate.weight) || no "$at"
        at=${at% *}
        for i in {0..7}; do
            [ $i -lt 2 ] && put "$file" $((at + i * 32 * 4)) "$pull" ||
                put "$file" $((at + i * 32 * 4)) "$zero"
        done
    done
}

# The mean balance of steps $2 to $3.
balance() {
    sed -nE 's/^\{"step":([0-9]+),.*"balance":([0-9.]+).*/\1 \2/p' "$1/metrics.jsonl" |
        awk -v from="$2" -v to="$3" '$1 >= from && $1 <= to { sum += $2; n++ }
            END { printf "%.3f\n", sum / n }'
}
below() { awk -v x="$1" -v y="$2" 'BEGIN { exit !(x < y) }' || no "$3: $1, expected below $2"; }

rebalances() { # ROUTER, and the flags that balance, or do not
    collapsed start --router "$1"
    run 0 "$TRAIN" --init start "${data[@]}" --eval-every 0 --out o --steps 200 "${@:2}"
    below 3.5 "$(balance o 1 3)" "balance at the start"
}
bias_alone() {
    rebalances sigmoid --bias-rate 0.003 --aux-loss 0 --z-loss 0
    below "$(balance o 181 200)" 1.3 "balance after 200 steps"
}
loss_alone() {
    rebalances softmax --aux-loss 0.1 --z-loss 0
    below "$(balance o 181 200)" 1.3 "balance after 200 steps"
}
both() {
    rebalances sigmoid --bias-rate 0.003 --aux-loss 0.01 --z-loss 0
    below "$(balance o 181 200)" 1.3 "balance after 200 steps"
}
neither() {
    rebalances "$1" --aux-loss 0 --z-loss 0 "${@:2}"
    below 2.5 "$(balance o 181 200)" "balance after 200 steps"
    said 'warning: step [0-9]+: for at least 50 steps most tokens went to these experts: layer [01]: [01]'
    said 'warning: .*--aux-loss'
}
dead() {
    pull='\x00\x00\xf0\x41' # 30.0: the softmax is 0 elsewhere, and so is its gradient
    rebalances softmax --aux-loss 0 --z-loss 0 --lr 1e-5 --min-lr 1e-5
    said 'warning: step 50: for at least 50 steps no token came to these experts: layer 0: 2, 3, 4, 5, 6, 7; layer 1: 2, 3, 4, 5, 6, 7; '
    said 'warning: step 100: for at least 100 steps no token'
    [ "$(grep -c 'warning: step .* no token' stderr)" = 3 ] || no "not at steps 50, 100 and 200"
    said ' balance 4\.00 \(12 dead\) ' stdout
    said '"layer_dead":\[6,6\]' o/metrics.jsonl
}
check experts/bias_rebalances bias_alone
check experts/loss_rebalances loss_alone
check experts/bias_and_loss_rebalance both
check experts/neither_stays_collapsed neither softmax
check experts/no_bias_stays_collapsed neither sigmoid --bias-rate 0
check experts/dead_ones_are_said dead

# ---- token rounding and capacity -----------------------------------------------------------------
# 2 layers of 2048 tokens in tiles of 128: the slots of a step are tiles, within one of K an expert.
rounding() {
    train --out o --steps 30 --routing round --tile 128 --eval-every 30
    steps_logged o 30
    sed -nE 's/.*"slots_dropped":([0-9]+),"slots_added":([0-9]+),"experts_per_token":([0-9.]+).*/\1 \2 \3/p' \
        o/metrics.jsonl | awk '
        { slots = 2 * 2048 * 2 - $1 + $2; moved += $1 + $2 }
        slots % 128 { print "step " NR ": " slots " slots are no tiles"; exit 1 }
        ($3 - 2)^2 > (8 * 128 / 2048)^2 { print "step " NR ": " $3 " experts a token"; exit 1 }
        ($3 - slots / 4096)^2 > 1e-10 { print "step " NR ": " $3 ", not " slots / 4096; exit 1 }
        END { if (NR != 30 || !moved) { print NR " steps, moved " moved; exit 1 } }' ||
        no "the log's slots are not those of token rounding"
    # the run's own validation is dropless: what eval, which knows nothing of tiles, says
    tail -c "$(wc -c <"$work/text" | awk '{ print $1 - int($1 * 0.9) }')" "$work/text" >held_out
    run 0 "$TRAIN" train "${model[@]}" --input "$work/text" --val held_out --seq 32 --batch 64 \
        --steps 3 --routing round --out v
    run 0 "$TRAIN" eval --model v --input held_out --batch 3
    awk -v want="$(sed -nE 's/.*"val_loss":([0-9.]+).*/\1/p' v/metrics.jsonl)" \
        '($2 - want)^2 > 1e-12 { exit 1 }' stdout || no "validation is not what eval says: $(cat stdout)"
    run 0 "$TRAIN" info --routing round --batch 2 --seq 100 --tile 64
    said 'warning: --tile 64 is more than .* even share of 50 tokens'
}
capacity() {
    local c
    for c in 0 0.5 1 3.9 4 1e9; do
        rm -rf o
        train --out o --steps 5 --capacity $c --eval-every 0
        steps_logged o 5
        sed -nE 's/.*"slots_dropped":([0-9]+),"slots_added":([0-9]+).*/\1 \2/p' o/metrics.jsonl >moved
        case $c in 4 | 1e9) ;; *) [ "$(wc -l <moved)" = 5 ] || no "capacity $c: no counts" ;; esac
        case $c in # of 2 layers x 2048 tokens x 2 experts
            0) ! grep -vx '8192 0' moved || no "capacity 0 keeps a slot" ;;
            0.5) awk '$1 < 4096 || $2 { exit 1 }' moved || no "capacity 0.5: $(head -n 1 moved)" ;;
            1) awk '$1 < 1 || $1 > 6144 { exit 1 }' moved || no "capacity 1: $(head -n 1 moved)" ;;
            3.9) ;; # a count is all that can be said
            *) # no expert can have more than all tokens: nothing is dropped, or counted
                [ ! -s moved ] || no "capacity $c: $(head -n 1 moved)"
                cmp o/latest/model.safetensors free 2>/dev/null || [ $c = 4 ] || no "$c differs"
                cp o/latest/model.safetensors free
                ;;
        esac
    done
    train --out p --steps 5 --eval-every 0
    same p/latest/model.safetensors free "dropless and --capacity 1e9:"
}
check experts/token_rounding rounding
check experts/capacity capacity

# ---- dense to MoE --------------------------------------------------------------------------------
upcycling() {
    local flags
    train --experts 1 --topk 1 --d-expert 48 --out dense --steps 40 --eval-every 40
    grep -o '"val_loss":[0-9.]*' dense/metrics.jsonl | tail -n 1 >want
    for flags in '--experts 4 --topk 2' '--experts 3 --topk 3 --router sigmoid --d-shared 8' \
        '--experts 4 --topk 1 --dense-layers 1'; do
        rm -rf up
        run 0 "$TRAIN" --init dense $flags "${data[@]}" --lr 0 --min-lr 0 --steps 1 --out up
        said '^upcycled dense/best: its MLP of width 48 is each of' stdout
        grep -o '"val_loss":[0-9.]*' up/metrics.jsonl | paste -d : - want |
            awk -F : '($2 - $4)^2 > 1e-12 { exit 1 }' || no "$flags: another loss than the dense"
    done
    # it trains, is resumed, and the experts part
    run 0 "$TRAIN" --init dense --experts 4 "${data[@]}" --steps 6 --save-every 3 --out full \
        --upcycle-noise 0.05
    cp -a full half
    rm -r half/step_00000006
    ln -sfn step_00000003 half/latest
    run 0 "$TRAIN" --resume half
    same full/latest/model.safetensors half/latest/model.safetensors
    for flags in '--experts 4 --d-expert 32' '--experts 4 --layers 3' '--experts 4 --heads 4' \
        '--experts 4 --topk 5'; do
        run 2 "$TRAIN" --init dense $flags "${data[@]}" --steps 1 --out no
        flags=${flags#* ? } && refused "^train_moe: error: ${flags% *}: .*found ${flags#* }"
    done
    run 2 "$TRAIN" --init full --experts 8 "${data[@]}" --steps 1 --out no
    refused '--experts: the model in full.* has 4, found 8'
    run 0 "$TRAIN" --init dense --experts 4 --norm-topk 0 "${data[@]}" --steps 1 --out raw
    said 'warning: --norm-topk 0'
    [ ! -e no ] || no "a refused run made its folder"
}
check experts/upcycling upcycling

# ---- what info shows -----------------------------------------------------------------------------
tables() {
    local n
    text 600 5 >second
    train --input second --out o --steps 12 --eval-every 6 --dense-layers 1
    run 0 "$TRAIN" info o
    said 'routing +dropless top-K; balance loss 0.01' stdout
    run 0 "$TRAIN" info o --tsv
    ! grep . stderr || no "said: $(cat stderr)"
    awk -F '\t' '
        /^# / { table = substr($0, 3); rows[table] = -1 }
        NF > 1 || /^step/ { rows[table]++ }
        table == "loss" && NF > 1 && NF != 10 { print "loss: " NF " columns"; exit 1 }
        table == "load" && rows[table] > 0 && NF > 1 {
            for (i = sum = 0; i < NF - 2; i++) sum += $(i + 3)
            if ($2 != 1 || (sum - 8)^2 > 1e-6) { print "load: layer " $2 ", sum " sum; exit 1 }
        }
        table == "text" && rows[table] == 0 && ($3 != "text" || $4 != "second") {
            print "texts: " $3 ", " $4; exit 1
        }
        table == "text" && rows[table] > 0 && NF > 1 { a += $3; b += $4 }
        END {
            if (rows["loss"] != 12 || rows["load"] != 12 || rows["text"] != 8) {
                print rows["loss"] ", " rows["load"] ", " rows["text"] " rows"; exit 1
            }
            if ((a - 8)^2 > 1e-6 || (b - 8)^2 > 1e-6) { print "texts: sums " a ", " b; exit 1 }
        }' stdout >why || no "$(cat why)"
    cp stdout all
    run 0 "$TRAIN" info o/latest --tsv
    same stdout all
    n=$(sed -nE 's/.*"step":12,.*"loss":([0-9.]+),.*/\1/p' o/metrics.jsonl)
    awk -F '\t' -v n="$n" '$1 == 12 && NF == 10 && ($3 - n)^2 < 1e-9 { ok = 1 } END { exit !ok }' \
        all || no "the last loss is not $n"
    mv second moved
    run 0 "$TRAIN" info o --tsv
    said 'warning: no table of the texts: .*second'
    train --experts 1 --topk 1 --out dense --steps 3 --eval-every 0
    run 0 "$TRAIN" info dense --tsv
    ! grep -E '^# (load|text)' stdout || no "a dense model has experts"
    mv dense/metrics.jsonl gone
    run 2 "$TRAIN" info dense --tsv
    refused metrics.jsonl
}
check experts/tables tables

plot() {
    command -v gnuplot >/dev/null || skip "no gnuplot here"
    train --out o --steps 12 --eval-every 6
    "$TRAIN" info o --tsv >o.tsv
    run 0 gnuplot -c "$root/data/plot.gp" o.tsv o
    ! grep -iE 'warning|error' stderr || no "gnuplot: $(head -n 1 stderr)"
    for n in loss load text; do
        head -c 8 o-$n.png | grep -q PNG || no "o-$n.png is no picture"
        grep -q '</svg>' o-$n.svg || no "o-$n.svg is no picture"
    done
}
check experts/plot plot
