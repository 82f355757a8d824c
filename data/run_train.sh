#!/usr/bin/env bash
# What `make train` runs once everything is built: trains the tiny preset on the texts of
# data/get_text.sh, or on TEXT alone, into the next free out/tiny-N.
set -euo pipefail
cd "$(dirname "$0")/.."

inputs=()
while IFS= read -r path; do
    inputs+=(--input "${path#"$PWD/"}")
done < <(data/get_text.sh "${TEXT:-}")
if [ ${#inputs[@]} = 0 ]; then
    echo "No text, so this trains on the program's own source: a smoke run, not a result."
    echo "make train TEXT=PATH trains on a text of yours."
    for path in README.md *.c *.h; do inputs+=(--input "$path"); done
fi

mkdir -p out
n=1
until mkdir "out/tiny-$n" 2>/dev/null; do # mkdir, so that two runs started together part ways
    [ -e "out/tiny-$n" ] || { echo "cannot make a folder in out/" >&2; exit 1; }
    n=$((n + 1))
done
out=out/tiny-$n

# Ctrl-C reaches train_moe as well, which saves and says how to resume: wait for it, add nothing.
interrupted=
trap 'interrupted=1' INT TERM
status=0
"${TRAIN:-./train_moe}" train --preset tiny "${inputs[@]}" --val-fraction 0.03 --out "$out" || status=$?
[ $status = 0 ] && [ -z "$interrupted" ] || exit $status

cat <<END

To try next:
  ./train_moe generate --model $out/best --prompt 'And he said' --tokens 400
  ./train_moe eval --model $out/best ${inputs[@]:0:2}
  ./train_moe info $out --tsv            losses, expert load, experts by text; make plot RUN=$out
  ./train_moe info --preset small
END
