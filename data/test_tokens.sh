#!/usr/bin/env bash
# Vocabularies with merges through the program: train_moe tokenize learns one and writes shards with
# it; train, resume, eval, generate and info work from the checkpoint's own.
. "$(dirname "$0")/testing.sh"

text 3000 >"$work/text"
text 400 5 >"$work/other"
tiny=(--layers 1 --d-model 16 --heads 2 --kv-heads 1 --experts 4 --topk 2 --d-expert 16 --seq 16
    --batch 2 --warmup 2 --sample-every 0)
golden=$root/data/golden/tokens_vocab.json

if ! "$TRAIN" tokenize --train-vocab 300 --input "$work/text" --out "$work/probe.json" \
    >"$work/log" 2>&1 && grep -q 'needs PCRE2' "$work/log"; then
    echo "skip tokens: built without PCRE2 (Debian, Ubuntu: apt-get install libpcre2-dev)"
    exit 0
fi

word() { od -An -tu4 -j"$2" -N4 "$1" | tr -d ' '; } # FILE OFFSET
ids() { tail -c +1025 -q "$@" | od -An -v -tu2 -w2 | tr -d ' '; }

learn() {
    run 0 "$TRAIN" tokenize --train-vocab 400 --input "$work/text" --out tok.json
    said '^vocabulary: (3[0-9][0-9]|400) tokens' stdout
    [ ! -e tokenizer_config.json ] || no "a file that was not asked for"
    run 0 "$TRAIN" tokenize --train-vocab 400 --input "$work/text" --out folder --threads 1
    same tok.json folder/tokenizer.json
    grep -q '"eos_token": "<|endoftext|>"' folder/tokenizer_config.json || no "no eos_token"
    run 2 "$TRAIN" tokenize --train-vocab 300 --input "$work/text" --out tok.json
    refused 'tok.json' 'overwrite'
    run 2 "$TRAIN" tokenize --train-vocab 300 --input "$work/text" --out folder
    refused 'folder' 'overwrite'
    same tok.json folder/tokenizer.json
    run 0 "$TRAIN" tokenize --train-vocab 300 --input "$work/text" --out folder --overwrite
    ! cmp -s tok.json folder/tokenizer.json || no "not replaced"
    printf 'aab' >few
    run 0 "$TRAIN" tokenize --train-vocab 300 --input few --out few.json
    said 'no pair occurs twice after 0 merges'
    run 2 "$TRAIN" tokenize --train-vocab 300 --vocab tok.json --input few --out x.json
    refused 'exclude each other'
    run 2 "$TRAIN" tokenize --train-vocab 300 --input few
    refused '--out'
    run 2 "$TRAIN" tokenize --train-vocab 300 --out x.json
    refused '--input'
    run 2 "$TRAIN" tokenize --train-vocab 300 --input few --out few
    refused '--out few' 'a text file'
}
check tokens/learn learn

shards() {
    mkdir docs
    cp "$work/text" docs/a
    cp "$work/other" docs/b
    printf 'x<|endoftext|>\377\0y' >docs/c
    run 0 "$TRAIN" tokenize --vocab "$golden" --input docs --out s
    said 'in 1 file of 16 bits, from 3 texts' stdout
    [ "$(ls s)" = "$(printf '%s\n' tokenizer.json tokenizer_config.json tokens_000000.bin)" ] ||
        no "found: $(ls -m s)"
    local f=s/tokens_000000.bin n
    n=$(word $f 8)
    [ "$(word $f 0) $(word $f 4)" = "20240520 1" ] || no "header $(word $f 0) $(word $f 4)"
    [ "$(stat -c %s $f)" = $((1024 + 2 * n)) ] || no "$n tokens, $(stat -c %s $f) bytes"
    [ "$(head -c 1024 $f | tail -c 1012 | tr -d '\0' | wc -c)" = 0 ] || no "a header with more in it"
    [ "$(ids $f | grep -cx 511)" = 3 ] || no "not one end-of-text token for each document"
    [ "$(ids $f | head -n 1)" = 511 ] || no "a document does not begin with one"
    ids $f >all
    # split at a limit; each file but the last is full; together the same
    run 0 "$TRAIN" tokenize --vocab "$golden" --input docs --out t --shard-tokens 5000 --threads 3
    [ "$(ls t/*.bin | wc -l)" = $(((n + 4999) / 5000)) ] || no "$n tokens in $(ls t/*.bin | wc -l)"
    [ "$(word t/tokens_000001.bin 8)" = 5000 ] || no "a file that is not full"
    ids t/*.bin >parts
    same all parts
    # bytes, without an end of text
    run 0 "$TRAIN" tokenize --input docs/c --out bytes
    [ "$(word bytes/tokens_000000.bin 8)" = 17 ] || no "not 17 bytes"
    # more than 65,536 ids: 32 bits
    awk -v s="$golden" 'BEGIN {
        while ((getline line < s) > 0) {
            if (line ~ /^  "added_tokens": \[$/) { print line; more = 1; continue }
            if (more) {
                for (i = 512; i < 66000; i++)
                    printf "{\"id\": %d, \"content\": \"<%d>\", \"special\": true},\n", i, i
                more = 0
            }
            print line
        }
    }' >wide.json
    run 0 "$TRAIN" tokenize --vocab wide.json --input docs --out w
    said 'files? of 32 bits' stdout
    f=w/tokens_000000.bin
    [ "$(word $f 0) $(word $f 4) $(word $f 8)" = "20240801 7 $n" ] || no "header of 32 bits"
    tail -c +1025 $f | od -An -v -tu4 -w4 | tr -d ' ' >wide
    same all wide
    # what is there is kept, and replaced only if asked for and ours
    run 2 "$TRAIN" tokenize --input docs/c --out s
    refused '--out s' '--overwrite'
    run 0 "$TRAIN" tokenize --input docs/c --out s --overwrite
    same s/tokens_000000.bin bytes/tokens_000000.bin
    run 2 "$TRAIN" tokenize --input docs/c --out docs --overwrite
    refused '--out docs' 'other files'
    run 2 "$TRAIN" tokenize --input docs/c --out docs/c --overwrite
    refused '--out docs/c' 'expected a folder'
    run 2 "$TRAIN" tokenize --input nothing --out v
    refused '--input nothing'
    run 2 "$TRAIN" tokenize --vocab docs/b --input docs --out v
    refused '--vocab docs/b' 'line 1'
    [ ! -e v ] || no "a refused run made its folder"
    [ -z "$(find . -name '.*' ! -name .)" ] || no "left: $(find . -name '.*' ! -name . | head -n 1)"
}
check tokens/shards shards

full() { # nothing half-written is left
    on_san && skip "a sanitizer needs its memory"
    (ulimit -f 8 && run 1 "$TRAIN" tokenize --vocab "$golden" --input "$work/text" --out s) ||
        exit 1
    said 'cannot write.*ulimit -f'
    [ -z "$(find . -mindepth 1 ! -name stdout ! -name stderr)" ] || no "left: $(ls -Am)"
}
check tokens/no_room full

stopped() {
    for i in {1..400}; do cat "$work/text"; done >big
    "$TRAIN" tokenize --vocab "$golden" --input big --out s >stdout 2>stderr &
    wait_for 20 test -e .s.tmp/tokens_000000.bin
    kill -TERM $!
    wait $! && skip "it was done before the signal came"
    [ ! -e s ] && [ ! -e .s.tmp ] || no "left: $(ls -Am)"
    said 'stopped by a signal'
    mkdir .s.tmp && : >.s.tmp/tokens_000009.bin # of a run that was killed
    run 0 "$TRAIN" tokenize --vocab "$golden" --input "$work/other" --out s
    [ ! -e .s.tmp ] && [ ! -e s/tokens_000009.bin ] || no "what a killed run left is still there"
}
check tokens/stopped stopped

training() {
    run 0 "$TRAIN" --vocab "$golden" --input "$work/text" "${tiny[@]}" --steps 6 --save-every 3 \
        --eval-every 3 --out whole --sample-every 3
    grep -q '"vocab_size": 512' whole/latest/config.json || no "vocab_size is not 512"
    same whole/latest/tokenizer.json "$golden"
    run 0 "$TRAIN" --vocab "$golden" --input "$work/text" "${tiny[@]}" --steps 3 --save-every 3 \
        --eval-every 3 --out part --sample-every 3 --schedule constant
    run 0 "$TRAIN" --vocab "$golden" --input "$work/text" "${tiny[@]}" --steps 6 --save-every 3 \
        --eval-every 3 --out one --sample-every 3 --schedule constant
    run 0 "$TRAIN" --resume part --steps 6
    ! grep -q warning stderr || no "resuming warns: $(cat stderr)"
    same_run part one
    run 2 "$TRAIN" --resume part --vocab "$golden"
    refused '--vocab' '--resume'
    run 2 "$TRAIN" --init part --vocab "$golden" --input "$work/text"
    refused '--vocab' '--init'
    # another text is noticed
    cp -a part other
    sed -i 's/stone/enots/' "$work/text"
    run 0 "$TRAIN" --resume other --steps 7
    said 'the data are not those'
    run 0 "$TRAIN" generate --model one --prompt 'the king' --tokens 9 --seed 2
    [ "$(head -c 8 stdout)" = 'the king' ] || no "does not begin with the prompt"
    run 0 "$TRAIN" generate --model one --tokens 4 --prompt $'\xff\xc3 \xf0\x9f'
    run 0 "$TRAIN" --init one --input "$work/other" --steps 2 --batch 2 --out further
    same further/latest/tokenizer.json "$golden"
    run 0 "$TRAIN" info one --tsv
}
check tokens/training training

# eval: bits per byte = loss in bits x tokens / bytes; an end-of-text token is no text, and the one that a
# text begins with is no target
bits() {
    run 0 "$TRAIN" --vocab "$golden" --input "$work/text" "${tiny[@]}" --steps 2 --out m
    { printf '\1the \377\300'; cat "$work/other"; } >odd # not valid UTF-8
    run 0 "$TRAIN" eval --model m --input odd
    local loss bpb n bytes
    read -r loss bpb n < <(sed -nE \
        's/^loss ([0-9.]+) .* bits per byte ([0-9.]+) \| ([0-9]+) tokens$/\1 \2 \3/p' stdout)
    bytes=$(wc -c <odd)
    run 0 "$TRAIN" tokenize --vocab "$golden" --input odd --out s
    [ "$(word s/tokens_000000.bin 8)" = "$n" ] || no "$n targets"
    awk -v l="$loss" -v n="$n" -v b="$bytes" -v is="$bpb" 'BEGIN {
        d = l / log(2) * n / b - is
        exit !(d < 1e-4 && d > -1e-4)
    }' || no "loss $loss, $n tokens, $bytes bytes: $bpb"
}
check tokens/bits_per_byte bits

# The tokenizer beside shards is found, and is no text.
beside() {
    run 0 "$TRAIN" tokenize --vocab "$golden" --input "$work/text" --out s
    for from in s s/tokens_000000.bin s 's/*.bin'; do
        run 0 "$TRAIN" --input "$from" "${tiny[@]}" --steps 4 --val "$work/other" --out run \
            --eval-every 2 --overwrite
        said '^vocabulary: 512 tokens, s/tokenizer.json' stdout
        grep -q '"eos_token_id": 511' run/latest/config.json || no "no eos_token_id"
        sed -E 's/,"step_ms".*//' run/metrics.jsonl >log
        cp run/latest/model.safetensors weights
        [ -e log.first ] || mv log log.first
        [ -e weights.first ] || mv weights weights.first
        [ ! -e log ] || same log log.first
        [ ! -e weights ] || same weights weights.first
    done
    # another vocabulary is the user's to name
    run 2 "$TRAIN" --input s --vocab "$work/text" "${tiny[@]}" --steps 1 --out other
    refused '--vocab .*text' 'line 1'
    run 0 "$TRAIN" tokenize --input "$work/text" --out b
    run 0 "$TRAIN" --input b "${tiny[@]}" --steps 1 --out other
    grep -q '"eos_token_id": null' other/latest/config.json || no "an end of text for bytes"
    run 0 "$TRAIN" info --vocab "$golden" "${tiny[@]:0:14}"
    said 'vocabulary 512$' stdout
    run 2 "$TRAIN" info run --vocab "$golden"
    refused '--vocab'
}
check tokens/beside_shards beside

# Texts end where the model says so, and one can be begun from nothing.
end_of_text() {
    for i in {1..60}; do printf 'a text of a line' >"t$i"; done
    run 0 "$TRAIN" --vocab "$golden" --input 't*' "${tiny[@]}" --seq 8 --val-fraction 0 --steps 150 \
        --warmup 5 --lr 2e-2 --out run --save-every 0
    run 0 "$TRAIN" generate --model run --prompt '' --tokens 100 --temperature 0
    [ "$(cat stdout)" = 'a text of a line' ] || no "found: $(cat stdout)"
}
check tokens/end_of_text end_of_text
