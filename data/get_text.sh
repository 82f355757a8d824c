#!/usr/bin/env bash
# Gets public-domain text to train on into data/text/, and prints the path of each text on stdout,
# one a line. Usage: data/get_text.sh [TEXT]   TEXT, a path of yours: printed, nothing fetched.
#        data/get_text.sh large      and 26 MB more into data/text/large/, for longer runs: Spurgeon's
#                                    Treasury of David, the World English Bible, Matthew Henry's
#                                    commentary, Jane Austen's novels, Moby Dick; Debian packages
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
    spurgeon=0d6b36dc84b82c6d4c6f3df80c376b24821c7a5ea2c5ca710bd9a53f4563392b
    web=a0b9396efbefe69e891db8bdaf69a36674ad1fc5edb5ce5f1c86f32ee9db18d9
    henry=fdb0b71b76a4bc144aed121f756d7878ee8f2351521725f85af114032ebfe47f
    austen=65b434d16a8755142bfa95ba19c5f9abd0d30cf3dffe3b6793e834f9f56dcc96
    mobydick=0a4f9d0a1e6faae432487248d0ae84221f1cd26f47a11bdf029314669a7bfc28
}
large=

say() { echo "text: $*" >&2; }
sha256() {
    { sha256sum "$1" 2>/dev/null || shasum -a 256 "$1"; } | cut -c 1-64
}

if [ "${1:-}" = large ]; then
    large="spurgeon web henry austen mobydick"
elif [ -n "${1:-}" ]; then
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

# Where the text NAME belongs.
place() {
    case $1 in
        kjv | sherlock | shakespeare) echo "$dir/$1.txt" ;;
        *) echo "$dir/large/$1.txt" ;;
    esac
}

# have NAME: is it there, with its sha256?
have() { [ -f "$(place "$1")" ] && [ "$(sha256 "$(place "$1")")" = "${!1}" ]; }

# keep NAME FILE SOURCE: FILE becomes the text NAME if it has the right sha256.
keep() {
    local sum to
    to=$(place "$1")
    sum=$(sha256 "$2")
    if [ "$sum" != "${!1}" ]; then
        say "$1.txt from $3 is not the expected text: sha256 $sum, expected ${!1}"
        return 1
    fi
    if ! mkdir -p "$(dirname "$to")" || ! cp "$2" "$part" || ! mv "$part" "$to"; then
        say "$1.txt cannot be written to $(dirname "$to")"
        return 1
    fi
    say "$1.txt: $(wc -c <"$to") bytes from $3"
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

# gzip reads a zlib stream whose first two bytes take the place of the last two of its own header; it
# has no checksum that gzip knows, which gzip says, after the last byte.
inflate() {
    { printf '\37\213\10\0\0\0\0\0' && cat; } | gzip -dc 2>/dev/null || true
}

# A module of SWORD, compressed by book or chapter: FILE.?zz is the streams, FILE.?zs says where each
# begins, and how long it is. OSIS markup goes, notes too: a paragraph or a verse a line.
sword() { # FILE.?zz...
    local file offset size rest
    for file; do
        od -An -v -tu4 -w12 "${file%z}s" | while read -r offset size rest; do
            [ "$size" -gt 2 ] || continue
            tail -c +$((offset + 1)) "$file" | head -c "$size" | inflate
        done
    done | tr '\0\n' '  ' | awk -v RS='<' '
        {
            at = NR > 1 ? index($0, ">") : 0
            tag = substr($0, 1, at - 1)
            text = substr($0, at + 1)
        }
        tag ~ /^note/ && tag !~ /\/$/ { note = 1 }
        tag ~ /^\/note/ { note = 0 }
        tag ~ /^\/?(title|div|verse|chapter|p|l|lg|lb)([ \/]|$)/ { printf "\n" }
        !note { printf "%s", text }' |
        sed -e 's/&lt;/</g; s/&gt;/>/g; s/&quot;/"/g; s/&apos;/'"'"'/g; s/&amp;/\&/g' \
            -e 's/[ \t]\{1,\}/ /g; s/^ //; s/ $//' | awk 'NF'
}

sword_from_debian() { # NAME PACKAGE MODULE
    unpack "$2" || return 1
    local modules=$tmp/root/usr/share/sword/modules file files=()
    for file in "$modules/$3"/ot.[bc]zz "$modules/$3"/nt.[bc]zz; do
        [ ! -s "$file" ] || files+=("$file")
    done
    sword "${files[@]}" >"$tmp/$1"
    keep "$1" "$tmp/$1" "the Debian package $2"
}

# The character vectors of a lazy-load database of R, a string a line. Rdata.rdx has the place and
# size of each object (integer vectors of two), Rdata.rdb the objects: four bytes of length, a stream.
r_strings() { # FOLDER
    gzip -dc "$1/Rdata.rdx" | od -An -v -tx1 | tr -d ' \n' | grep -o '0000000d00000002.\{16\}' |
        while read -r pair; do
            tail -c +$((0x${pair:16:8} + 5)) "$1/Rdata.rdb" |
                head -c $((0x${pair:24:8} - 4)) | inflate | od -An -v -tu1 -w4096
        done | awk '
            # a string is its flags (0 4 0 9 in ASCII, 0 0 128 9 in UTF-8), its length, its bytes
            {
                for (i = 1; i <= NF; i++) {
                    if (left > 0) {
                        printf "%c", $i + 0
                        if (--left == 0) printf "\n"
                    } else if (need > 0) {
                        left = left0 = left0 * 256 + $i
                        if (--need > 0) left = 0
                        else if (left == 0) printf "\n"
                    } else {
                        a = b; b = c; c = d; d = $i + 0
                        if (a == 0 && d == 9 && (b == 4 && c == 0 || b == 0 && c == 128)) {
                            need = 4
                            left0 = 0
                        }
                    }
                }
            }'
}

austen_from_debian() {
    unpack r-cran-janeaustenr || return 1
    r_strings "$tmp/root/usr/lib/R/site-library/janeaustenr/data" >"$tmp/austen"
    keep austen "$tmp/austen" "the Debian package r-cran-janeaustenr"
}

mobydick_from_debian() {
    unpack r-cran-tokenizers || return 1
    r_strings "$tmp/root/usr/lib/R/site-library/tokenizers/data" | gutenberg >"$tmp/mobydick"
    keep mobydick "$tmp/mobydick" "the Debian package r-cran-tokenizers"
}

spurgeon_from_debian() { sword_from_debian spurgeon sword-comm-tdavid comments/zcom/tdavid; }
web_from_debian() { sword_from_debian web sword-text-web texts/ztext/engWEB2015eb; }
henry_from_debian() { sword_from_debian henry sword-comm-mhcc comments/zcom/mhcc; }

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
for name in $large; do have "$name" || "${name}_from_debian" || true; done

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
for name in $large; do
    if have "$name"; then place "$name" && found=1; fi
done
[ $found = 1 ] || { say "no text could be had"; exit 1; }
