#!/usr/bin/env bash
# Are the tests of the kernels any good? Faults are put into moe_kernels.cu, one at a time, and the
# tests of the emulated device must find them.
#
#   data/mutate.sh PROGRAM     what `make mutate` runs: every mutant on PROGRAM, a test_moe with
#                              the switched kernels; ONLY=NAME or ONLY=GROUP: these alone
#   data/mutate.sh --switch    the switched kernels, on stdout
#   data/mutate.sh --check     only whether data/mutants.tsv fits the source
#
# data/mutants.tsv has a row for each mutant, of six columns between tabs; the last may be missing.
# Rows that start with # are comments:
#   name        GROUP/WHAT
#   operations  of `test_moe diff --op`, with commas, in the order they are tried; a word with / is
#               the name of checks of test_moe
#   types       fp32, bf16 or both, likewise
#   old text    as it stands in moe_kernels.cu, where it must occur exactly once; \n is a new line.
#               What is replaced is between two @, the rest only says where; without @, all of it
#   new text    may be empty for statements
#   reason      why it survives, where that is expected
# What is replaced is a statement, or several, if it ends with ";", else an expression.
#
# All mutants are compiled at once: the switched source has at each place
#   { if (mutant == 7) { new } else { old } }   or   (mutant == 7 ? (new) : (old))
# where mutant is the number of a row, or 0, from the environment. Lines stay where they are. So a
# constant expression (a template argument, an enum) cannot be mutated, nor a declaration; its
# initialiser can.
#
# A mutant is caught by exit status 1 of a test, a fault that the emulated device names, a crash, or
# a run of more than ten times what the unchanged code takes, and 30 seconds. It is tried with one
# seed, and with two more if it survives. Before that, the unchanged code must pass the same. Exit
# status 1 if less than 95 % are caught, or one survives that has no reason.
set -uo pipefail
export LC_ALL=C OMP_WAIT_POLICY=passive
cd "$(dirname "$0")/.." || exit 1
rows=data/mutants.tsv source=moe_kernels.cu
least=95 seeds='1 2 3'

# Checks the rows; with 1 writes the switched source.
apply() {
    awk -F '\t' -v emit="$1" -v file="$rows" '
    function wrong(what) { print "mutate: " file ":" FNR ": " what | "cat >&2"; failed = 1 }
    function lines(text) { gsub(/\\n/, "\n", text); return text }
    # A comment to the end of the line would hide what is put behind it.
    function closed(text,   i, rest) {
        for (rest = ""; i = index(text, "//"); ) {
            rest = rest substr(text, 1, i - 1) "/*"
            text = substr(text, i + 2)
            i = index(text, "\n")
            if (!i) i = length(text) + 1
            rest = rest substr(text, 1, i - 1) "*/"
            text = substr(text, i)
        }
        return rest text
    }
    FNR == NR { all = all $0 "\n"; next }
    /^#/ || !NF { next }
    {
        n++
        if (NF < 5 || NF > 6) { wrong(NF " columns: expected 5 or 6"); next }
        if ($1 !~ /^[a-z_0-9]+\/[A-Za-z_0-9-]+$/) wrong("expected a name GROUP/WHAT, found " $1)
        if ($1 in seen) wrong($1 " is there twice")
        seen[$1] = 1
        if ($2 !~ /^[a-z_0-9\/]+(,[a-z_0-9\/]+)*$/) wrong("expected operations, found \"" $2 "\"")
        if ($3 !~ /^(fp32|bf16|fp32,bf16|bf16,fp32)$/) wrong("expected types, found \"" $3 "\"")
        old = lines($4)
        marks = split(old, part, "@")
        if (marks == 1) { part[2] = part[1]; part[1] = part[3] = "" }
        else if (marks != 3) { wrong("expected two @ or none"); next }
        old = part[1] part[2] part[3]
        at = index(all, old)
        if (!at || old == "") { wrong($1 ": its old text is not in the source"); next }
        if (index(substr(all, at + 1), old)) {
            wrong($1 ": its old text is in the source more than once")
            next
        }
        at += length(part[1])
        statement = part[2] ~ /;[ \n]*$/
        if (part[2] == lines($5)) wrong($1 ": its new text is the old one")
        if ($5 == "" && !statement) wrong($1 ": an expression needs a new text")
        if (!(at in was)) place[++places] = at
        else if (was[at] != part[2]) wrong($1 ": it overlaps another one")
        was[at] = part[2]
        is_statement[at] = statement
        if (statement)
            new[at] = new[at] "if (mutant == " n ") { " lines($5) " } else "
        else
            new[at] = new[at] "mutant == " n " ? (" lines($5) ") : "
    }
    END {
        for (i = 2; i <= places; i++) { # in the order of the source
            x = place[i]
            for (j = i - 1; j && place[j] > x; j--) place[j + 1] = place[j]
            place[j + 1] = x
        }
        for (i = 2; i <= places; i++)
            if (place[i - 1] + length(was[place[i - 1]]) > place[i]) {
                print "mutate: two old texts overlap: " was[place[i]] | "cat >&2"
                failed = 1
            }
        if (!n) { print "mutate: " file " has no rows" | "cat >&2"; failed = 1 }
        if (failed) exit 1
        if (!emit) { print n " mutants at " places " places"; exit 0 }
        printf "%s", "static const int mutant = getenv(\"MUTANT\") ? atoi(getenv(\"MUTANT\")) : 0; "
        from = 1
        for (i = 1; i <= places; i++) {
            at = place[i]
            printf "%s", substr(all, from, at - from)
            if (is_statement[at]) printf "{ %s{ %s } }", new[at], closed(was[at])
            else printf "(%s(%s))", new[at], closed(was[at])
            from = at + length(was[at])
        }
        printf "%s", substr(all, from)
    }' "$source" "$rows"
}

case ${1-} in
    --check) apply 0; exit ;;
    --switch) apply 1; exit ;;
    '' | -*) echo 'mutate: expected --check, --switch or a program' >&2; exit 2 ;;
esac
program=$1
apply 0 >/dev/null || exit 1
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# run MUTANT OPERATION TYPE SEED LIMIT: 0 if the test passes, else 1 and what it saw in $why
run() {
    local status=0
    local test=(diff --device emulated --dtype "$3" --op "$2" --seed "$4" --stop)
    [ "$2" = "${2#*/}" ] || test=("$2")
    { MUTANT=$1 timeout -k 5 "$5" "$program" "${test[@]}" >"$log/out" 2>"$log/err"; } \
        2>/dev/null || status=$?
    case $status in
        0) return 0 ;;
        124 | 137) why="no end within $5 s" ;;
        1)
            why=$(sed -n 's/^emulated device: //p' "$log/err" | head -n 1)
            [ "$why" ] || why=$(sed -nE \
                's/^[^ ]+ +([^ ]+) +([^ ]+) +([^ ]+) .* FAIL: (.*)/\1, \2, \3: \4/p
                s/^FAIL ([^:]*): (.*)/\1: \2/p' "$log/out" | head -n 1)
            [ "$why" ] || why=$(head -n 1 "$log/err")
            ;;
        129 | 1[3-9]?) why="killed by signal $((status - 128))" ;;
        *)
            echo "mutate: $program ${test[*]}: exit status $status: $(head -n 1 "$log/err")" >&2
            exit 2
            ;;
    esac
    why="$2, $3: ${why:-exit status 1}"
    return 1
}

# How long the unchanged code may take, in limit[OPERATION TYPE SEED]; it must pass.
declare -A limit
unchanged() {
    local key="$1 $2 $3" start=$SECONDS
    if [ ! "${limit[$key]-}" ]; then
        run 0 "$1" "$2" "$3" 3600 || {
            echo "mutate: the unchanged code fails: $why" >&2
            exit 1
        }
        limit[$key]=$((10 * (SECONDS - start) + 30))
    fi
    allowed=${limit[$key]}
}

# tried NUMBER OPERATIONS TYPES SEED: 1 if the mutant is caught
tried() {
    local op type
    for op in ${2//,/ }; do
        for type in ${3//,/ }; do
            unchanged "$op" "$type" "$4"
            run "$1" "$op" "$type" "$4" "$allowed" || return 1
        done
    done
}

chosen() {
    [ ! "${ONLY-}" ] || [ "$ONLY" = "$name" ] || [ "$ONLY" = "${name%%/*}" ]
}
# A tab is white space to read: empty columns would be lost.
table() { sed -E '/^#|^$/d; s/\t/\x1f/g' "$rows"; }

mutants=0 caught=0 unexplained=0 number=0 start=$SECONDS groups=()
declare -A of_group caught_of_group
while IFS=$'\x1f' read -r name ops types _; do
    chosen || continue
    mutants=$((mutants + 1))
    for op in ${ops//,/ }; do
        for type in ${types//,/ }; do unchanged "$op" "$type" 1; done
    done
done < <(table)
if [ $mutants = 0 ]; then
    echo "mutate: ONLY=${ONLY-}: expected a name or a group of $rows" >&2
    exit 2
fi
echo "mutate: the unchanged code passes ${#limit[@]} tests ($((SECONDS - start)) s)"

while IFS=$'\x1f' read -r name ops types _ _ reason; do
    number=$((number + 1)) group=${name%%/*}
    chosen || continue
    [ "${of_group[$group]-}" ] || groups+=("$group")
    of_group[$group]=$((${of_group[$group]-0} + 1))
    survived=1
    for seed in $seeds; do
        tried $number "$ops" "$types" "$seed" || { survived=0; break; }
    done
    if [ $survived = 0 ]; then
        caught=$((caught + 1))
        caught_of_group[$group]=$((${caught_of_group[$group]-0} + 1))
        printf 'caught    %-32s %s%s\n' "$name" "$why" \
            "${reason:+ (expected to survive: its reason no longer holds)}"
    else
        [ "$reason" ] || unexplained=$((unexplained + 1))
        printf 'SURVIVED  %-32s %s\n' "$name" "${reason:-no reason is known: a test is missing}"
    fi
done < <(table)

for group in "${groups[@]}"; do
    printf '%-20s %3d of %3d caught\n' "$group" "${caught_of_group[$group]-0}" \
        "${of_group[$group]}"
done
echo "$mutants mutants, $caught caught ($((100 * caught / mutants))%), $unexplained unexplained" \
    "($((SECONDS - start)) s)"
[ $((100 * caught)) -ge $((least * mutants)) ] && [ $unexplained = 0 ]
