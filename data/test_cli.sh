#!/usr/bin/env bash
# The command line: every flag refuses by its name what it cannot take, and takes what it can; so do
# the commands, with files that are missing, empty or of another kind. And what the commands print.
. "$(dirname "$0")/testing.sh"

text 300 >"$work/text"
text 200 5 >"$work/other"
tiny=(--layers 1 --d-model 16 --heads 2 --kv-heads 1 --experts 4 --topk 2 --d-expert 16 --seq 16
    --batch 2 --warmup 2)
train() { run 0 "$TRAIN" --input "$work/text" "${tiny[@]}" "$@"; }

# ---- flags ---------------------------------------------------------------------------------------
# Every flag: its name, its kind, whether 0 is a value, values that it takes, values that it refuses
# besides those that its kind refuses. Written from what a flag means, not from the program: a flag
# of --help that is not here, or the reverse, is a failure.
flags='
input         path   -   @text                      @nothing,@no*thing
val           path   -   @other                     @nothing
val-fraction  real   yes 0.5                        1,1.5
vocab         text   -   @model/latest/tokenizer.json  @text,@nothing
train-vocab   whole  no  257,300                    256
shard-tokens  whole  no  100,7                      2147483648
out           text   -   new                        @text
overwrite     switch -
init          text   -   @model,@model/latest       @text,@nothing
resume        text   -
model         text   -   @model,@model/latest       @text,@nothing
preset        text   -   tiny                       Tiny,tin
layers        whole  no  1,3
d-model       whole  no  16                         17
heads         whole  no  2,4
kv-heads      whole  no  1,2                        3
head-dim      whole  no  2,6                        1,7
experts       whole  no  2,5                        1
topk          whole  no  1,4                        5
d-expert      whole  no  1,33
d-shared      whole  yes 8
dense-layers  whole  yes 1                          2
qk-norm       name   -   none,full,head
router        name   -   softmax,sigmoid
arch          name   -   auto,olmoe,mixtral,qwen3_moe  llama,moe_c
norm-topk     whole  yes 1                          2
tied          whole  yes 1                          2
rope-theta    real   no  1e6,1e4
norm-eps      real   no  1e-5                       10
aux-loss      real   yes 0.1
z-loss        real   yes 0.1
bias-rate     real   yes 0.01                       2
routing       name   -   topk,round
tile          whole  no  4,32                       33
capacity      real   yes 1.25,1e9
upcycle-noise real   yes 0.1                        11
batch         whole  no  1,7
seq           whole  no  1,33                       20000000
total-batch   whole  yes 96                         33
steps         whole  no  1
lr            real   yes 1e-3,.5
min-lr        real   yes 1e-5
warmup        whole  yes 1
schedule      name   -   cosine,linear,constant,wsd
optimizer     name   -   adamw,sgd
weight-decay  real   yes 0.01
beta1         real   yes 0.8                        1
beta2         real   yes 0.95                       1
grad-clip     real   yes 0.5
eval-every    whole  yes 1
eval-batches  whole  yes 2
sample-every  whole  yes 1
save-every    whole  yes 1
keep          whole  yes 1
log-every     whole  yes 1
routing-every whole  yes 1
device        name   -   cpu                        gpu
dtype         name   -   fp32                       bf16,fp16
dense         name   -   own                        cublas,mkl
recompute     whole  yes 1,2                        3
ep            whole  no  1                          2
zero          whole  yes 1                          2
dispatch      name   -   auto,alltoall,dedup,allgather  all
dispatch-dtype name  -   own,bf16                   fp8
dispatch-chunk whole no  2,1000                     1
placement     text   -
threads       whole  yes 1,2                        100000
seed          whole  yes 123456789
profile       switch -
tsv           switch -
tax           switch -
growth        switch -
json          switch -
log           text   -   @model                     @nothing,@text,@model/latest
ranks         whole  no  1,2,4                      65537
nodes         whole  no  1,2                        3,4
prompt        text   -   king,-1,\377
tokens        whole  no  1,40
temperature   real   yes 1.5
top-k         whole  yes 1,1000
top-p         real   yes 0.5,1                      1.01
'
bad_of() { # KIND
    case $1 in
        whole) echo "|x|-1|nan|1e99|1.5|5x|0x|99999999999999999999|-99999999999999999999" ;;
        real) echo "|x|-1|nan|-nan|inf|-inf|1e99|1e999|1,5|5x" ;;
        name) echo "|x|-1|0|nan|1e99" ;;
        text | path) echo "|" ;;
    esac
}

# What a command needs besides the flag under test.
command_line() { # COMMAND FLAG
    line=("$TRAIN" "$1")
    case $1 in
        train) line+=("${tiny[@]}" --steps 1 --threads 1) ;;
        info) line+=("${tiny[@]:0:16}") ;;
        generate) line+=(--tokens 3) ;;
        place) line+=(--log model --ranks 2) ;;
    esac
    case $1:$2 in
        train:input | eval:input | tokenize:input) ;;
        train:* | eval:* | tokenize:*) line+=(--input text) ;;
    esac
    case $1:$2 in generate:model | eval:model) ;; generate:* | eval:*) line+=(--model model) ;; esac
    case $1:$2 in # flags that need others
        *:bias-rate) line+=(--router sigmoid) ;;
        *:routing) line+=(--batch 8) ;; # as many tokens as --tile rounds to
        info:ranks) line+=(--batch 8) ;;
        *:tile) line+=(--routing round --batch 2) ;;
        *:dense-layers) line+=(--layers 2) ;;
        train:upcycle-noise) line=("$TRAIN" train --init dense --experts 4 --steps 1) ;;
        info:tsv) line+=(--model model) ;;
    esac
    case $1:$2 in train:upcycle-noise) line+=(--batch 2 --input text) ;; esac
    case $1:$2 in train:out | train:resume) ;; train:*) line+=(--out o) ;; esac
    case $1:$2 in tokenize:out) ;; tokenize:*) line+=(--out o) ;; esac
}

prepare() {
    cp "$work/text" "$work/other" .
    train --steps 2 --out model
    train --steps 1 --out dense --experts 1 --topk 1
}

refuses() { # COMMAND
    local name kind zero good bad value line tried=0
    prepare
    contents . | grep -v -e '^\./stdout ' -e '^\./stderr ' -e '^\. ' >"$work/before"
    while read -r name kind zero good bad; do
        grep -q "^$name\$" "$work/names.$1" || continue
        command_line "$1" "$name"
        value=()
        IFS='|' read -ra value <<<"$(bad_of "$kind")"
        [ "$zero" != no ] || value+=(0)
        IFS=, read -ra good <<<"$bad"
        value+=("${good[@]//@/}")
        if [ "$kind" = switch ]; then
            value=(yes 0 '')
        elif [ "$name" != resume ]; then # which may stand alone
            run 2 "${line[@]}" "--$name"
            refused "^train_moe: error: --$name\\b"
            run 2 "${line[@]}" "--$name" --threads 1
            refused "^train_moe: error: --$name\\b"
        fi
        for value in "${value[@]}"; do
            run 2 "${line[@]}" "--$name=$value"
            refused "^train_moe: error: .*--$name\\b"
            tried=$((tried + 1))
            [ "$value" ] && [ "$kind" != switch ] || continue
            run 2 "${line[@]}" "--$name" "$value"
            refused "^train_moe: error: .*--$name\\b"
        done
        run 2 "${line[@]}" "--${name}x" 1
        refused "--${name}x"
        [ "${name%?}" = to ] || { run 2 "${line[@]}" "--${name%?}" 1; refused "--${name%?}"; }
    done <<<"$flags"
    contents . | grep -v -e '^\./stdout ' -e '^\./stderr ' -e '^\. ' >"$work/after"
    [ ! -e o ] || no "a refused run made its folder"
    same "$work/before" "$work/after"
    [ $tried -gt 10 ] || no "tried $tried values"
}

takes() { # COMMAND
    local name kind zero good bad value line
    prepare
    while read -r name kind zero good bad; do
        grep -q "^$name\$" "$work/names.$1" || continue
        command_line "$1" "$name"
        IFS=, read -ra value <<<"$good"
        [ "$zero" != yes ] || value+=(0)
        for value in "${value[@]}"; do
            rm -rf o
            value=$(printf -- "${value//@/}")
            run 0 "${line[@]}" "--$name=$value"
            rm -rf o new
            run 0 "${line[@]}" "--$name" "$value"
        done
        [ "$kind" != switch ] || { rm -rf o && run 0 "${line[@]}" "--$name"; }
    done <<<"$flags"
}

help_is_whole() { # COMMAND
    local name
    run 0 "$TRAIN" "$1" --help
    sed -nE 's/^  --([a-z0-9-]+) .*/\1/p' stdout >"$work/names.$1"
    [ "$(wc -l <"$work/names.$1")" -gt 3 ] || no "--help lists no flags"
    [ -z "$(sort "$work/names.$1" | uniq -d)" ] || no "twice in --help"
    while read -r name; do
        grep -q "^$name " <<<"$flags" || no "--$name is in --help and not in this test"
    done <"$work/names.$1"
    # each flag on one line, with a few words about it
    sed -n '/^  --/,/^$/p' stdout | grep -vE '^  --[a-z0-9-]+ +([A-Z]+ +)?[A-Za-z0-9].{7,}|^$' >odd
    [ ! -s odd ] || no "odd line in --help: $(head -n 1 odd)"
    cp stdout help.long
    run 0 "$TRAIN" "$1" -h
    same stdout help.long
}
for c in train generate eval info bench tokenize place; do check cli/help_$c help_is_whole $c; done

all_flags() {
    local name rest
    while read -r name rest; do
        [ -z "$name" ] || grep -qx "$name" "$work"/names.* || no "--$name is in no --help"
    done <<<"$flags"
}
check cli/every_flag_is_in_a_help all_flags
for c in train generate eval info tokenize place; do
    check cli/refuses_$c refuses $c
    check cli/takes_$c takes $c
done

# --arch: what it makes of a new model, what it refuses, and that a run keeps it.
archs() {
    local words type norm topk pattern
    while IFS='|' read -r words type norm topk; do
        rm -rf o p
        train --steps 1 --out o $words
        run 0 "$TRAIN" --resume o --steps 2
        grep -q "\"model_type\": \"$type\"" o/latest/config.json || no "$words: no $type"
        grep -q "\"qk-norm\": \"$norm\"" o/latest/trainer.json || no "$words: not $norm"
        grep -q "\"norm-topk\": $topk" o/latest/trainer.json || no "$words: not $topk"
        run 0 "$TRAIN" --init o --input "$work/text" --batch 2 --steps 1 --out p
        grep -q "\"model_type\": \"$type\"" p/latest/config.json || no "$words: then no $type"
        run 0 "$TRAIN" generate --model p --tokens 3
    done <<'END'
|qwen3_moe|head|1
--arch qwen3_moe --dense-layers 1 --layers 2|qwen3_moe|head|1
--arch olmoe|olmoe|full|0
--arch olmoe --norm-topk 1|olmoe|full|1
--arch mixtral --head-dim 12|mixtral|none|1
--qk-norm none|mixtral|none|1
--qk-norm full --norm-topk 0|olmoe|full|0
--experts 1 --topk 1|qwen3|head|1
--experts 1 --topk 1 --qk-norm none|llama|none|1
--d-shared 8|moe_c|head|1
--qk-norm none --norm-topk 0|moe_c|none|0
END
    run 2 "$TRAIN" --resume o --steps 3 --arch olmoe
    refused '--arch cannot change'
    while IFS='|' read -r words pattern; do
        run 2 "$TRAIN" --input "$work/text" "${tiny[@]}" --out q $words
        refused "$pattern"
    done <<'END'
--arch olmoe --qk-norm head|--arch olmoe: .*found --qk-norm head
--arch olmoe --head-dim 4|--arch olmoe: .*found a head width other than
--arch olmoe --d-shared 8|--arch olmoe: .*found a shared expert
--arch olmoe --layers 2 --dense-layers 1|--arch olmoe: .*found dense first layers
--arch mixtral --norm-topk 0|--arch mixtral: .*found --norm-topk 0
--arch mixtral --router sigmoid|--arch mixtral: .*found a sigmoid router
--arch mixtral --experts 1 --topk 1|--arch mixtral: .*found a dense model
--arch qwen3_moe --qk-norm full|--arch qwen3_moe: .*found --qk-norm full
--arch mixtral --init p|--arch mixtral: .*found
END
    [ ! -e q ] || no "a refused run made its folder"
    run 0 "$TRAIN" info --preset olmoe-1b-7b --arch olmoe
    run 0 "$TRAIN" info --preset mixtral-8x7b --arch mixtral
    run 2 "$TRAIN" info --preset tiny --arch olmoe --qk-norm none
}
check cli/archs archs

words() {
    local pattern words
    prepare
    while IFS='|' read -r words pattern; do
        run 2 "$TRAIN" $words
        refused "$pattern"
    done <<'END'
trian|'trian'
Train|'Train'
-x|'-x'
-lr 1|'-l
--Lr 1|'--Lr'
--lr|--lr
--no-such-flag|'--no-such-flag'
info extra|--model extra
info model extra|'extra'
info model --model model|--model
train eval|'eval'
generate --lr 1|--lr is not a flag of generate
eval --steps 2|--steps is not
info --input text|--input is not
bench --out o|--out is not
place --model model|--model is not
--steps 1 text|'text'
--steps 1 -- text|'text'
END
    run 2 "$TRAIN"
    refused --input
    [ ! -e o ] && [ ! -e out/run-1 ] || no "something was made"
    train --steps 1 # no --out
    [ -e out/run-1/latest/model.safetensors ] || no "no out/run-1"
    train --steps 1
    [ -e out/run-2/latest/model.safetensors ] || no "no out/run-2"
    run 0 "$TRAIN" generate --tokens 2
    said '^out/run-2/best'
    run 0 "$TRAIN" --steps=1 --input=text "${tiny[@]}" --seed 3 --seed 4
    grep -q '"seed": 4' out/run-3/latest/trainer.json || no "not the last of two"
    run 0 "$TRAIN" --resume
    said 'out/run-3' stdout
}
check cli/words words

# ---- files that are not what they should be -----------------------------------------------------
inputs() {
    local n
    : >empty
    mkdir folder
    printf 'one line of text, much too short\n' >short # 33 bytes
    for n in nothing 'no*thing' empty folder /dev/null; do
        run 2 "$TRAIN" "${tiny[@]}" --steps 1 --out o --input "$n"
        refused "${n//\*/\\*}"
        run 2 "$TRAIN" "${tiny[@]}" --steps 1 --out o --input "$work/text" --val "$n"
        refused "${n//\*/\\*}"
    done
    run 2 "$TRAIN" "${tiny[@]}" --steps 1 --out o --input short --seq 32
    refused short '\b(29|30)\b' '\b33\b' # tokens there are, tokens needed
    run 2 "$TRAIN" "${tiny[@]}" --steps 1 --out o --input short --seq 33 --val-fraction 0
    refused short '\b33\b' '\b34\b'
    [ ! -e o ] || no "a refused run made its folder"
    run 0 "$TRAIN" "${tiny[@]}" --steps 3 --out o --input short --seq 32 --val-fraction 0 \
        --eval-every 1
    said 'no validation'
    ! grep -q val_loss o/metrics.jsonl || no "a validation loss without a validation text"
    steps_logged o 3
    run 0 "$TRAIN" "${tiny[@]}" --steps 2 --out same --input "$work/text" --val "$work/text"
    said 'both training and validation'
    cp "$work/text" "$work/other" folder
    head -c 3000 "$BASH" >folder/binary
    printf '\0\377\r\n%.0s' {1..99} >folder/bytes
    run 0 "$TRAIN" "${tiny[@]}" --steps 2 --out p --input folder --input 'folder/*t'
    said '4 files' stdout
}

check cli/inputs inputs

not_checkpoints() {
    local c what
    prepare
    mkdir folder
    : >empty
    for c in 'eval --input text --model' 'generate --model' 'info --model' \
        "--input text ${tiny[*]} --out o --init" "--resume"; do
        run 2 "$TRAIN" $c text
        refused 'text: .*text file'
        run 2 "$TRAIN" $c folder
        refused folder
        run 2 "$TRAIN" $c nothing
        refused nothing
        run 2 "$TRAIN" $c empty
        refused 'empty file'
    done
    for what in model.safetensors config.json tokenizer.json; do
        cp -a model/latest/. broken
        cp text "broken/$what"
        run 2 "$TRAIN" generate --model broken
        refused "broken/$what" 'text file|JSON'
        rm "broken/$what"
        run 2 "$TRAIN" generate --model broken
        refused "broken"
        rm -r broken
    done
    run 2 "$TRAIN" "${tiny[@]}" --input text --out o --init model --layers 2
    refused --layers
    [ ! -e o ] || no "a refused run made its folder"
}
check cli/not_checkpoints not_checkpoints

# ---- sizes ---------------------------------------------------------------------------------------
edges() {
    local e
    for e in '--experts 3 --topk 3' '--experts 1 --topk 1' '--batch 1' \
        '--batch 1 --total-batch 48' \
        '--seq 1' '--experts 1 --topk 1 --batch 1 --recompute 2' '--d-expert 1' \
        '--layers 3 --experts 9'; do
        rm -rf o
        train --steps 3 --out o $e --eval-every 1 --eval-batches 3 --sample-every 2 --save-every 1
        steps_logged o 3
        ! grep -iE 'nan|inf' o/metrics.jsonl || no "$e: not finite"
        run 0 "$TRAIN" --resume o --steps 4
        run 0 "$TRAIN" eval --model o --input "$work/other" --eval-batches 2
        run 0 "$TRAIN" generate --model o --tokens 40
    done
    run 2 "$TRAIN" "${tiny[@]}" --input "$work/text" --experts 4 --topk 5 --out p
    refused '--topk' '\b4\b' '\b5\b'
}
check cli/edges edges

# info needs no memory to speak of a model of 47 billion parameters; training it says what to lower.
memory() {
    local start=$SECONDS
    run 2 "$TRAIN" --input "$work/text" --out o --batch 100000 --seq 2048
    refused '--batch' 'available'
    run 2 "$TRAIN" --input "$work/text" --out o --batch 100 --d-model 65536 --heads 8 \
        --kv-heads 8 --head-dim 64 --layers 100
    refused 'available'
    [ ! -e o ] || no "a refused run made its folder"
    on_san && return
    (ulimit -v 300000 && run 0 "$TRAIN" info --preset mixtral-8x7b) || exit 1
    said '^parameters +46\.[67]' stdout
    said 'active' stdout
    said 'FLOPs' stdout
    (ulimit -v 300000 && run 0 "$TRAIN" info --preset qwen3-30b-a3b) || exit 1
    said '^parameters +30\.5' stdout
    (ulimit -v 300000 && run 0 "$TRAIN" info --preset olmoe-1b-7b) || exit 1
    said '^parameters +6\.9' stdout
    [ $((SECONDS - start)) -lt 20 ] || no "took $((SECONDS - start)) s"
}
check cli/memory memory

# ---- what the commands print ---------------------------------------------------------------------
trained() { train --steps 60 --lr 0.01 --out model --threads 1 --eval-every 0; }
generate() {
    local long n
    trained
    long=$(text 9)
    run 0 "$TRAIN" generate --model model --tokens 50 --seed 3 --prompt 'the king'
    [ "$(wc -c <stdout)" = 59 ] || no "prompt of 8, 50 bytes and a line end, found $(wc -c <stdout)"
    [ "$(head -c 8 stdout)" = 'the king' ] || no "does not begin with the prompt"
    cp stdout first
    run 0 "$TRAIN" generate --model model --tokens 50 --seed 3 --prompt 'the king' --threads 3
    same first stdout "same seed:"
    run 0 "$TRAIN" generate --model model --tokens 50 --seed 4 --prompt 'the king'
    ! cmp -s first stdout || no "another seed, the same text"
    run 0 "$TRAIN" generate --model model --tokens 50 --temperature 0 --prompt 'the king'
    cp stdout first
    run 0 "$TRAIN" generate --model model --tokens 50 --temperature 0 --seed 9 --prompt 'the king'
    same first stdout "temperature 0:"
    run 0 "$TRAIN" generate --model model --tokens 50 --top-k 1 --seed 9 --prompt 'the king'
    same first stdout "top-k 1:"
    run 0 "$TRAIN" generate --model model --tokens 50 --top-p 0 --seed 9 --prompt 'the king'
    same first stdout "top-p 0:"
    # a prompt and a text beyond the context of 16
    run 0 "$TRAIN" generate --model model --tokens 100 --prompt "$long"
    [ "$(wc -c <stdout)" = $((${#long} + 101)) ] || no "long prompt: $(wc -c <stdout) bytes"
    [ "$(head -c ${#long} stdout)" = "$long" ] || no "does not begin with the long prompt"
    # a prompt that is the beginning of a generated text goes on like it, up to the context of 16
    run 0 "$TRAIN" generate --model model --tokens 50 --temperature 0 --prompt 'the king'
    cp stdout first
    for n in {9..16}; do
        long=$(head -c $n first; echo .)
        run 0 "$TRAIN" generate --model model --temperature 0 --tokens $((58 - n)) \
            --prompt "${long%.}"
        same first stdout "prompt of $n bytes:"
    done
    # any bytes
    for long in $'\303\251\316\261' $'\377\376\001' $'\303' ' '; do
        run 0 "$TRAIN" generate --model model --tokens 4 --prompt "$long"
        [ "$(head -c ${#long} stdout)" = "$long" ] || no "the prompt is not what came out"
    done
}
check cli/generate generate

bytes() { # a text of all bytes: generated bytes are bytes
    local i
    for i in {0..255}; do printf "\\x$(printf %x $i)"; done >256
    for i in {1..20}; do cat 256; done >all
    run 0 "$TRAIN" "${tiny[@]}" --input all --steps 5 --out o --eval-every 5 --sample-every 2
    run 0 "$TRAIN" eval --model o --input all
    said '5119 tokens' stdout
    run 0 "$TRAIN" generate --model o --tokens 300 --temperature 2
    [ "$(wc -c <stdout)" = 302 ] || no "expected 302 bytes, found $(wc -c <stdout)"
    [ "$(tr -d '\0-\177' <stdout | wc -c)" -gt 0 ] || no "no byte over 127"
}
check cli/any_bytes bytes

# The validation loss of the log is what eval says of the same text, however it is batched.
evaluation() {
    local logged batch
    train --val "$work/other" --steps 5 --eval-every 5 --out o
    logged=$(sed -nE 's/.*"val_loss":([0-9.]+).*/\1/p' o/metrics.jsonl)
    for batch in 1 3 16 700; do
        run 0 "$TRAIN" eval --model o --input "$work/other" --batch $batch
        awk -v a="$logged" '{ d = a - $2; exit !(d < 1e-6 && d > -1e-6) }' stdout ||
            no "--batch $batch: $(cat stdout), the log has $logged"
        said " $(($(wc -c <"$work/other") - 1)) tokens" stdout
        awk '{ p = exp($2) / $5 - 1; b = $2 / log(2) - $10
            exit !(p * p < 1e-8 && b * b < 1e-8) }' stdout ||
            no "perplexity or bits per byte: $(cat stdout)"
    done
}
check cli/eval_is_the_validation_loss evaluation

# ---- five seeds, and one that must fail ---------------------------------------------------------
seeds() {
    local seed
    for seed in 1 2 3 4 5; do
        train --steps 300 --out o$seed --seed $seed --eval-every 100 --save-every 0 --threads 1
        ! grep -iE 'nan|inf' o$seed/metrics.jsonl || no "seed $seed is not finite"
        steps_logged o$seed 300
        awk -F'[:,]' '{ sum += $6 } NR % 20 == 0 { at[NR] = sum / 20; sum = 0 }
            END { exit !(at[300] < at[20] - 1) }' o$seed/metrics.jsonl ||
                no "seed $seed does not learn"
    done
    ! cmp -s o1/latest/model.safetensors o2/latest/model.safetensors ||
        no "seeds make no difference"
}
check cli/five_seeds seeds

diverges() {
    local step
    run 1 "$TRAIN" --input "$work/text" "${tiny[@]}" --out o --steps 3000 --schedule constant \
        --warmup 200 --lr 100 --eval-every 0 --save-every 5 --grad-clip 1 --threads 1
    refused 'step [0-9]+: ' \
        'layer [0-9]|[a-z_]+\.weight|token [0-9]' 'no weight was changed' ' o[;,. ]'
    ! grep -q 'layer -1' stderr || no "there is no layer -1: $(cat stderr)"
    step=$(sed -nE 's/.*step ([0-9]+): .*/\1/p' stderr)
    [ "$(readlink o/latest)" = "$(printf step_%08d $(((step - 1) / 5 * 5)))" ] ||
        no "latest is not before"
    steps_logged o $((step - 1))
    ! grep -iE 'nan|inf' o/metrics.jsonl || no "the log is not finite"
    run 0 "$TRAIN" eval --model o/latest --input "$work/other" --eval-batches 1
    cp stderr first
    run 1 "$TRAIN" --resume o # the same step again
    said "step $step: "
}
check cli/diverges diverges
