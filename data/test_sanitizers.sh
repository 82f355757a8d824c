#!/usr/bin/env bash
# lane: builds
# The test programs and every command under the address and undefined-behaviour sanitizers.
# No report may come.
# `make SAN=1 test` runs all tests that way; this is the short form that is part of `make test`.
. "$(dirname "$0")/testing.sh"

! on_san || { echo "skip sanitizers: this is a sanitizer build already"; exit 0; }
text 300 >"$work/text"

# A SAN=1 build of a program; prints its path.
sanitized() { # COMPILER PROGRAM
    local folder
    command -v "$1" >/dev/null || skip "no $1 here"
    printf 'int main(void) { return 0; }\n' >probe.c
    "$1" -fsanitize=address,undefined probe.c -o probe >probe.log 2>&1 &&
        ./probe >>probe.log 2>&1 ||
        skip "$1 has no sanitizers here: $(tail -n 1 probe.log)"
    cd "$root" || exit 1
    folder=$($MAKE --no-print-directory -s --eval='folder: ; @echo $(B)' folder \
        CC="$1" SAN=1 2>&1) ||
        skip "$(tail -n 1 <<<"$folder")"
    $MAKE --no-print-directory "$folder/$2" CC="$1" SAN=1 >"$work/make.log" 2>&1 ||
        no "does not build: $(grep -E 'error:|undefined reference' "$work/make.log" | head -n 1)"
    echo "$root/$folder/$2"
}
program() { # COMPILER PROGRAM: its path into $san
    local status=0
    san=$(sanitized "$@" 2>&1) || status=$?
    [ $status = 0 ] || { echo "$san" | tail -n 1; exit $status; }
}

commands() {
    local tiny=(--layers 2 --d-model 24 --heads 3 --kv-heads 1 --head-dim 8 --experts 5 --topk 2
        --d-expert 20 --seq 19 --batch 3 --total-batch 114 --steps 6 --warmup 2 --eval-every 2
        --save-every 2 --sample-every 3 --keep 1) o
    program "$1" train_moe
    run 0 "$san" --input "$work/text" --out o "${tiny[@]}" --threads 2
    run 0 "$san" --resume o --steps 9 --threads 3
    run 0 "$san" --init o/best --input "$work/text" --out p --seq 33 --steps 3 --recompute 2 \
        --batch 1
    for o in '--experts 1 --topk 1' '--optimizer sgd --tied 1 --topk 5' \
        '--recompute 1 --norm-topk 0' \
        '--router sigmoid --d-shared 7 --dense-layers 1 --qk-norm full --capacity 0.5' \
        '--routing round --tile 16 --qk-norm none --topk 1' '--capacity 0'; do
        run 0 "$san" --input "$work/text" --out "o $o" "${tiny[@]}" $o --steps 3 --threads 2
        run 0 "$san" --resume "o $o" --steps 4
    done
    run 0 "$san" --input "$work/text" --init "o --experts 1 --topk 1" --experts 3 --topk 2 \
        --d-shared 5 --upcycle-noise 0.1 --batch 2 --steps 2 --out up
    run 0 "$san" info up --tsv
    run 0 "$san" eval --model o --input "$work/text" --batch 5
    run 0 "$san" generate --model o --tokens 60 --prompt "$(text 3)" --top-k 5 --top-p 0.9
    run 0 "$san" generate --model o --tokens 5 --prompt $'\xff\x01 \xc3\xa9' --temperature 0
    run 0 "$san" info --model o
    run 0 "$san" info --preset qwen3-30b-a3b
    run 0 "$san" --help
    # refusals read damaged files and half an argument list
    run 2 "$san" --input "$work/text" --out q --topk
    run 2 "$san" --resume nowhere
    truncate -s 1000 o/latest/model.safetensors
    run 2 "$san" eval --model o/latest --input "$work/text"
    head -c 300 /dev/zero >o/latest/model.safetensors
    run 2 "$san" generate --model o/latest
    cp "$work/text" o/latest/config.json
    run 2 "$san" info --model o/latest
}
tests() { # COMPILER PROGRAM
    [ -e "$root/$2.c" ] || skip "no $2.c"
    program "$1" "$2"
    FUZZ="$root/data/fuzz" "$san" >out 2>stderr ||
        no "exit status $?: $(grep -E 'Sanitizer|runtime error|^FAIL' out stderr | head -n 1)"
    ! grep -E '^FAIL' out || no "$(grep '^FAIL' out | head -n 1)"
    grep -q '^ok ' out || no "$2 tried nothing"
}
check sanitizers/commands commands "$CC"
check sanitizers/test_moe tests "$CC" test_moe
check sanitizers/test_fuzz tests "$CC" test_fuzz
[ "$CC" = clang ] || check sanitizers/clang_commands commands clang
