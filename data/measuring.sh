# shellcheck shell=bash
# For scripts that measure (worth.sh, peer.sh), which source it.

# The number of "NAME": in every line of JSON that has one.
field() { sed -nE 's/.*"'"$1"'": *([-+0-9.e]+).*/\1/p'; }
# The median of a list of numbers; nothing of none.
median() { sort -g | awk '{ x[NR] = $1 } END { if (NR) print NR % 2 ? x[(NR + 1) / 2] : (x[NR / 2] + x[NR / 2 + 1]) / 2 }'; }
