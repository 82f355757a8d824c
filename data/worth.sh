#!/usr/bin/env bash
# When is a mixture of experts worth it? Trains a dense model and two mixtures of the same active size
# on the same texts, each for the same wall time, and says which one got further.
#
#     data/worth.sh            goes on where it stopped; about two and a half hours on two cores in all
#     data/worth.sh table      only the table and the picture of the runs so far (gnuplot)
#
# What runs: every model with each learning rate at the smallest budget, first seed; then, with the rate
# that was best for it, every seed at every budget, the largest budget first. The run that chose the
# rate is one of those (the same training, to the bit), its rows are written again and not run again.
# A run that is done is appended to the file of runs (data/worth.tsv, committed), all of it at once, so
# it may be stopped at any moment.
#
# A budget is seconds of training. Seconds a step are measured once, before the first run, models by
# turns, and kept in the file: budget / seconds = steps, so that the schedule of the learning rate is
# known and a run can be repeated to the bit. Seconds in the file are steps times that; the time that
# the run really took, with its evaluations, stands beside.
#
# Columns: what (speed, rate, run), model, learning rate, seed, budget in s, seconds a step, steps in
# all, step, seconds, elapsed seconds, validation loss; of speed: the shape and the processor at the end.
#
# The models are narrow enough for ten minutes to be many bytes a parameter (about 40): at a width of 192
# no model has seen enough to be told apart (data/worth_192.tsv).
#
# Settings: WORTH (the file), BUDGETS, RATES, SEEDS, TEXT (a file or folder, instead of
# data/get_text.sh large), TRAIN (the program), SHAPE (flags of all models).
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
. data/measuring.sh

file=${WORTH:-data/worth.tsv}
read -ra budgets <<<"${BUDGETS:-180 600}"
read -ra rates <<<"${RATES:-1e-3 2e-3 4e-3}"
read -ra seeds <<<"${SEEDS:-1 2 3}"
train=${TRAIN:-./train_moe}
read -ra shape <<<"${SHAPE:---preset tiny}"
EVALS=20 # of a run
declare -A model=(
    [dense]='--experts 1 --topk 1 --d-expert 256'
    [8-2]='--experts 8 --topk 2 --d-expert 128'
    [64-8]='--experts 64 --topk 8 --d-expert 32'
)
names=(dense 8-2 64-8)

stop() { echo "worth: $*" >&2; exit 2; }
say() { echo "worth: $*" >&2; }
# Rows of the file: `rows WHAT MODEL RATE SEED BUDGET`, "" = any.
rows() {
    [ ! -e "$file" ] || awk -F '\t' -v w="$1" -v m="$2" -v r="$3" -v s="$4" -v b="$5" '
        (w == "" || $1 == w) && (m == "" || $2 == m) && (r == "" || $3 == r) &&
        (s == "" || $4 == s) && (b == "" || $5 == b)' "$file"
}

# ---- the runs ------------------------------------------------------------------------------------
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

inputs=()
find_texts() {
    if [ "${TEXT:-}" ]; then
        inputs=(--input "$TEXT")
    else
        while IFS= read -r path; do inputs+=(--input "$path"); done < <(data/get_text.sh large)
    fi
    [ ${#inputs[@]} -gt 0 ] || stop "expected texts from data/get_text.sh large, found none; TEXT=PATH names one"
}
# One training: `trained MODEL STEPS RATE SEED EVERY`; its log is $work/log.
trained() {
    local -a flags
    read -ra flags <<<"${model[$1]}"
    rm -rf "$work/run"
    "$train" "${shape[@]}" "${flags[@]}" "${inputs[@]}" --val-fraction 0.004 --steps "$2" --lr "$3" \
        --min-lr "$(awk -v r="$3" 'BEGIN { print r / 20 }')" --seed "$4" --eval-every "$5" \
        --save-every 0 --sample-every 0 --warmup "$(($2 / 20 + 1))" --out "$work/run" \
        >"$work/out" 2>"$work/err" || { cat "$work/err" >&2; exit 1; }
    mv "$work/run/metrics.jsonl" "$work/log"
}
processor() { sed -nE 's/^model name\s*: //p' /proc/cpuinfo 2>/dev/null | head -n 1; }

measure_speed() {
    local name round
    [ "$(rows speed '' '' '' '' | wc -l)" != ${#names[@]} ] || return 0
    say "seconds a step, models by turns"
    for round in 1 2 3; do
        for name in "${names[@]}"; do
            trained "$name" 14 1e-3 1 0
            tail -n +3 "$work/log" | field step_ms >>"$work/speed.$name"
        done
    done
    for name in "${names[@]}"; do
        printf 'speed\t%s\t-\t-\t-\t%s\t-\t-\t-\t%s\t%s\n' "$name" \
            "$(median <"$work/speed.$name" | awk '{ printf "%.5f", $1 / 1000 }')" \
            "${shape[*]} ${model[$name]}" "$(processor | tr '\t' ' ')"
    done >"$work/rows"
    cat "$work/rows" >>"$file"
}

# `one WHAT MODEL RATE SEED BUDGET`: makes the run, unless it is there.
one() {
    local each steps every
    [ "$(rows "$1" "$2" "$3" "$4" "$5" | wc -l)" = 0 ] || return 0
    rows rate "$2" "$3" "$4" "$5" | sed "s/^rate/$1/" >"$work/rows"
    if [ -s "$work/rows" ]; then
        cat "$work/rows" >>"$file"
        return
    fi
    each=$(rows speed "$2" '' '' '' | cut -f 6)
    steps=$(awk -v b="$5" -v e="$each" 'BEGIN { n = int(b / e); print n < 2 ? 2 : n }')
    every=$((steps / EVALS > 0 ? steps / EVALS : 1))
    say "$1: $2, learning rate $3, seed $4, $5 s = $steps steps"
    trained "$2" "$steps" "$3" "$4" "$every"
    grep '"val_loss"' "$work/log" | while IFS= read -r line; do
        local step loss elapsed
        step=$(field step <<<"$line") loss=$(field val_loss <<<"$line")
        elapsed=$(field elapsed_s <<<"$line")
        printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" "$5" "$each" \
            "$steps" "$step" "$(awk -v s="$step" -v e="$each" 'BEGIN { printf "%.2f", s * e }')" \
            "$elapsed" "$loss"
    done >"$work/rows"
    tail -n 1 "$work/rows" | awk -F '\t' '{ exit $7 != $8 }' || { say "the run has no final loss"; exit 1; }
    cat "$work/rows" >>"$file"
}
# The rate of a model whose run at the smaller budget ended lowest; nothing before all have run.
best_rate() {
    rows rate "$1" '' '' '' | awk -F '\t' -v list="${rates[*]}" '
        BEGIN { n = split(list, wanted, " "); for (i = 1; i <= n; i++) is[wanted[i]] = 1 }
        $8 == $7 && $3 in is { seen++; if (best == "" || $11 < best) { best = $11; rate = $3 } }
        END { if (seen >= n) print rate }'
}

if [ "${1:-}" != table ]; then
    [ $# = 0 ] || stop "expected nothing or 'table', found '$1'"
    [ -x "$train" ] || stop "expected the program $train, found none: make"
    find_texts
    was=$(rows speed '' '' '' '' | cut -f 11 | head -n 1)
    [ -z "$was" ] || [ "$was" = "$(processor)" ] ||
        stop "the runs in $file are of another processor ($was): WORTH=FILE starts another file"
    for name in "${names[@]}"; do
        was=$(rows speed "$name" '' '' '' | cut -f 10)
        [ -z "$was" ] || [ "$was" = "${shape[*]} ${model[$name]}" ] ||
            stop "the runs in $file are of another shape ($was): WORTH=FILE starts another file"
    done
    measure_speed
    for name in "${names[@]}"; do
        for rate in "${rates[@]}"; do one rate "$name" "$rate" "${seeds[0]}" "${budgets[0]}"; done
    done
    for budget in $(printf '%s\n' "${budgets[@]}" | sort -rn); do
        for seed in "${seeds[@]}"; do
            for name in "${names[@]}"; do one run "$name" "$(best_rate "$name")" "$seed" "$budget"; done
        done
    done
fi

# ---- the table -----------------------------------------------------------------------------------
[ -s "$file" ] || stop "$file: no runs yet"
echo "| model | budget | learning rate | seeds | steps | seconds a step | final loss: median, each | time to the dense model's final loss, of its own |"
echo "|---|---|---|---|---|---|---|---|"
for budget in "${budgets[@]}"; do
    for name in "${names[@]}"; do
        rows run "$name" '' '' "$budget" | cat - <(rows run dense '' '' "$budget" | sed 's/^/of\t/') |
            awk -F '\t' -v name="$name" -v budget="$budget" '
            function median(x, n,   i, j, t) {
                for (i = 2; i <= n; i++)
                    for (j = i; j > 1 && x[j - 1] > x[j]; j--) { t = x[j]; x[j] = x[j - 1]; x[j - 1] = t }
                return n % 2 ? x[(n + 1) / 2] : (x[n / 2] + x[n / 2 + 1]) / 2
            }
            $1 == "of" { if ($8 == $9) of[$5] = $12; next }
            {
                if (!($4 in k)) { k[$4] = 0; seed[++n] = $4 }
                at[$4, ++k[$4]] = $9; loss[$4, k[$4]] = $11
                rate = $3; steps = $7; each = $6
            }
            END {
                if (!n) exit
                for (i = 1; i <= n; i++) {
                    s = seed[i]; last = loss[s, k[s]]; final[i] = last
                    list = list (i > 1 ? ", " : "") sprintf("%.4f", last)
                    # between the two evaluations where it passes the loss of the dense run of this seed
                    when = ""
                    for (j = 1; j <= k[s] && (s in of); j++)
                        if (loss[s, j] <= of[s]) {
                            when = at[s, j]
                            if (j == 1) break
                            part = (loss[s, j - 1] - of[s]) / (loss[s, j - 1] - loss[s, j])
                            when = at[s, j - 1] + (at[s, j] - at[s, j - 1]) * part
                            break
                        }
                    if (s in of) { pairs++; share[pairs] = when == "" ? 9 : when / budget }
                }
                reach = pairs ? median(share, pairs) : 0
                reach = !pairs ? "-" : reach > 1 ? "not within it" : sprintf("%.2f", reach)
                if (name == "dense") reach = "1"
                printf "| %s | %s s | %s | %d | %d | %.4f | %.4f: %s | %s |\n", name, budget, rate, n,
                    steps, each, median(final, n), list, reach
            }'
    done
done
echo
echo "Learning rates, at ${budgets[0]} s (final loss):"
for name in "${names[@]}"; do
    rows rate "$name" '' '' '' |
        awk -F '\t' -v name="$name" '$8 == $7 { s = s sprintf("  %s: %.4f", $3, $11) } END { if (s != "") print "  " name s }'
done

# ---- the picture ---------------------------------------------------------------------------------
if command -v gnuplot >/dev/null; then
    picture=${file%.tsv}.svg
    for name in "${names[@]}"; do # median and spread over the seeds, at each step that all have
        rows run "$name" '' '' "${budgets[-1]}" | sort -t "$(printf '\t')" -k 8,8n -k 11,11g |
            awk -F '\t' '
            function put() { if (n) print at, x[int((n + 1) / 2)], x[1], x[n] }
            $8 != step { put(); n = 0; step = $8; at = $9 }
            { x[++n] = $11 }
            END { put() }' >"$work/$name"
    done
    (
        cd "$work"
        cat >plot <<END
set terminal svg size 900,600 font ",14" background "white"
set title "Validation loss over seconds of training, ${budgets[-1]} s; median and spread over seeds; line: where the dense one ends"
set xlabel "seconds"
set ylabel "cross entropy (nats a byte)"
set grid
END
        # the first evaluations, much higher than the rest, are left out; a line at the dense one's end
        top=$(awk 'FNR == 3 && $4 > top { top = $4 } END { if (top) print top }' "${names[@]}")
        [ -z "$top" ] || echo "set yrange [*:$top]" >>plot
        end=$(tail -n 1 dense | cut -d ' ' -f 2)
        [ -z "$end" ] || echo "set arrow from graph 0, first $end to graph 1, first $end nohead lc 1 lw 1" >>plot
        draw=
        colour=0
        for name in "${names[@]}"; do
            colour=$((colour + 1))
            [ -s "$name" ] || continue
            draw+="${draw:+, }'$name' using 1:3:4 with filledcurves fs transparent solid 0.2 lc $colour notitle, '$name' using 1:2 with linespoints lw 2 pt 7 ps 0.4 lc $colour title '$name'"
        done
        [ -z "$draw" ] || { echo "plot $draw" >>plot; gnuplot plot >picture.svg; }
    )
    [ ! -s "$work/picture.svg" ] || { cp "$work/picture.svg" "$picture"; say "the picture: $picture"; }
else
    say "no gnuplot here: no picture"
fi
