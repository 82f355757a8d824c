#!/usr/bin/env bash
# Gets public-domain text to train on into data/text/, and prints the path of each text on stdout,
# one a line. Usage: data/get_text.sh [TEXT]   TEXT, a path of yours: printed, nothing fetched.
#
# Safe to run again: a text that is there with the right sha256 is kept, another is replaced, and a
# file that you put into data/text/ yourself (*.txt, under another name) is used as it is.
# Sources, in order, until there are both texts:
#   1. data/text/
#   2. Debian packages, downloaded and unpacked in a temporary folder: no root, nothing installed
#   3. HTTPS; Shakespeare stands in where there is no Bible, so that two kinds of text are there
# The sha256 is of the finished text: one source is as good as another, none has to be trusted.
# A source that fails is one line on stderr. Exit status 0 with at least one text, 1 with none.
#
# The texts: the King James Bible, a verse a line; The Adventures of Sherlock Holmes (Project
# Gutenberg 1661, without its header and licence); forty thousand lines of Shakespeare's plays, as
# many small trainers use them. Project Gutenberg itself is not a source: it revises its files in
# place, so no sha256 of one lasts.
set -euo pipefail
export LC_ALL=C

# The sha256 of each text, read through its name.
# shellcheck disable=SC2034
{
    kjv=cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d
    sherlock=efc28bcd78eb3e5a903117fb117819208c6745849ea4862ad7e6ed6b216aa69d
    shakespeare=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
}

say() { echo "text: $*" >&2; }
sha256() {
    { sha256sum "$1" 2>/dev/null || shasum -a 256 "$1"; } | cut -c 1-64
}

if [ -n "${1:-}" ]; then
    printf '%s\n' "$1"
    exit 0
fi

dir=$(cd "$(dirname "$0")" && pwd)/text
mkdir -p "$dir"
tmp=$(mktemp -d)
part=$dir/.part.$$
trap 'rm -rf "$tmp" "$part"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# have NAME: is data/text/NAME.txt there, with its sha256?
have() { [ -f "$dir/$1.txt" ] && [ "$(sha256 "$dir/$1.txt")" = "${!1}" ]; }

# keep NAME FILE SOURCE: FILE becomes data/text/NAME.txt if it has the right sha256.
keep() {
    local sum
    sum=$(sha256 "$2")
    if [ "$sum" != "${!1}" ]; then
        say "$1.txt from $3 is not the expected text: sha256 $sum, expected ${!1}"
        return 1
    fi
    if ! cp "$2" "$part" || ! mv "$part" "$dir/$1.txt"; then
        say "$1.txt cannot be written to $dir"
        return 1
    fi
    say "$1.txt: $(wc -c <"$dir/$1.txt") bytes from $3"
}

# A Project Gutenberg file on stdin to its text: what stands between the START and END
# lines, without the producers' line, carriage returns and blank lines at either end.
gutenberg() {
    tr -d '\r' | awk '
        /^(\*\*\* *END OF|End of (the )?Project Gutenberg)/ { exit }
        on && !/^Produced by/ {
            if (/^[ \t]*$/) { blank++; next }
            if (begun) while (blank > 0) { print ""; blank-- }
            blank = 0; begun = 1; print
        }
        /^\*\*\* *START OF/ { on = 1 }'
}

# ---- Debian packages -----------------------------------------------------------------------------
apt=(apt-get -q -o APT::Sandbox::User=root -o Acquire::Retries=1
    -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30)

# Where apt knows no packages yet (a fresh container), or only old ones, lists of our own serve.
own_lists() {
    [ ! -d "$tmp/lists" ] || return 1
    mkdir -p "$tmp/lists/partial" "$tmp/cache/archives/partial"
    apt+=(-o "Dir::State::lists=$tmp/lists" -o "Dir::Cache=$tmp/cache")
    "${apt[@]}" update >"$tmp/log" 2>&1
}

# unpack PACKAGE...: into $tmp/root
unpack() {
    if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
        say "Debian package $*: no apt-get and dpkg-deb here"
        return 1
    fi
    mkdir -p "$tmp/deb" "$tmp/root"
    get() { (cd "$tmp/deb" && "${apt[@]}" download "$@" >"$tmp/log" 2>&1); }
    if ! get "$@" && ! { own_lists && get "$@"; }; then
        say "Debian package $*: $(grep -m 1 '^E:' "$tmp/log" || echo 'cannot be downloaded')"
        return 1
    fi
    for p in "$tmp"/deb/*.deb; do dpkg-deb -x "$p" "$tmp/root" && mv "$p" "$p.done"; done
}

kjv_from_debian() {
    unpack bible-kjv bible-kjv-text || return 1
    # The program finds bible.data in the folder it runs in.
    bible() {
        (cd "$tmp/root/usr/lib" && LD_LIBRARY_PATH=$libraries ../bin/bible -f gen1:1-rev22:21) \
            </dev/null >"$tmp/kjv" 2>"$tmp/log"
    }
    local libraries="" readline
    if ! bible; then
        # It is linked with readline, which a small system does not have.
        readline=$(dpkg-deb -f "$tmp"/deb/bible-kjv_*.deb.done Depends |
            tr ', ' '\n' | grep '^libreadline')
        unpack "$readline" libtinfo6 || return 1
        libraries=$(echo "$tmp"/root/{usr/,}lib/*-linux-* | tr ' ' ':')
        bible || { say "bible-kjv does not run: $(head -n 1 "$tmp/log")"; return 1; }
    fi
    keep kjv "$tmp/kjv" "the Debian package bible-kjv"
}

sherlock_from_debian() {
    unpack golang-github-pierrec-lz4-dev || return 1
    local file
    file=$(find "$tmp/root" -name pg1661.txt | head -n 1)
    [ -n "$file" ] || { say "golang-github-pierrec-lz4-dev has no pg1661.txt"; return 1; }
    gutenberg <"$file" >"$tmp/sherlock"
    keep sherlock "$tmp/sherlock" "the Debian package golang-github-pierrec-lz4-dev"
}

# ---- HTTPS ---------------------------------------------------------------------------------------
github=https://raw.githubusercontent.com

# download URL FILE
download() {
    if command -v curl >/dev/null; then
        curl -fsSL --connect-timeout 15 --max-time 120 -o "$2" "$1" 2>"$tmp/log"
    elif command -v wget >/dev/null; then
        wget -q -T 30 -t 2 -O "$2" "$1" 2>"$tmp/log"
    else
        say "neither curl nor wget for $1"
        return 1
    fi || {
        say "$1: $(tail -n 1 "$tmp/log" | grep . || echo 'cannot be downloaded')"
        return 1
    }
}

sherlock_from_https() {
    download "$github/pierrec/lz4/v2.5.2/testdata/pg1661.txt" "$tmp/pg1661" || return 1
    gutenberg <"$tmp/pg1661" >"$tmp/sherlock"
    keep sherlock "$tmp/sherlock" HTTPS
}

shakespeare_from_https() {
    download "$github/karpathy/char-rnn/master/data/tinyshakespeare/input.txt" "$tmp/shakespeare" ||
        return 1
    keep shakespeare "$tmp/shakespeare" HTTPS
}

# ---- all of them, in order -----------------------------------------------------------------------
have kjv || kjv_from_debian || true
have sherlock || sherlock_from_debian || sherlock_from_https || true
have kjv || have shakespeare || shakespeare_from_https || true

found=0
for file in "$dir"/*.txt; do
    [ -f "$file" ] || continue
    name=$(basename "$file" .txt)
    case $name in
        kjv | sherlock | shakespeare)
            if ! have "$name"; then
                say "$file is not the expected text: left out (a text of yours: under another name)"
                continue
            fi ;;
    esac
    printf '%s\n' "$file"
    found=1
done
[ $found = 1 ] || { say "no text could be had"; exit 1; }
