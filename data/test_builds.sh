#!/usr/bin/env bash
# lane: builds
# The same bits from every build: compilers, optimisation levels, vector widths, with and without
# OpenMP, on another processor, with any number of threads. Each trains 20 steps and must end with
# the checkpoint whose sha256 stands here, and with the same log.
#
# The run names every flag that matters and makes its own text, so the sum changes only when the
# arithmetic, the order of the data, the start values or the file format do. After such a change:
# run this script, see that all builds still agree, and put the new sum here.
. "$(dirname "$0")/testing.sh"
want=af78cd3352d89dd8b69f0cdaad91e0521a5e41cb5698239399e18b7d6c0d8d23

cd "$root" || exit 1
# Sizes that no vector width divides; both balance losses; clipping; two micro-batches; validation.
text 400 11 >"$work/text"
flags=(--input "$work/text" --val-fraction 0.1 --layers 2 --d-model 40 --heads 4 --kv-heads 2
    --head-dim 10 --experts 5 --topk 2 --d-expert 24 --norm-topk 1 --tied 0 --rope-theta 10000
    --norm-eps 1e-6 --aux-loss 0.05 --z-loss 0.01 --batch 3 --seq 33 --total-batch 198 --steps 20
    --lr 0.005 --min-lr 0.0005 --warmup 3 --schedule cosine --optimizer adamw --weight-decay 0.1
    --beta1 0.9 --beta2 0.99 --grad-clip 0.5 --eval-every 10 --eval-batches 0 --sample-every 0
    --save-every 0 --recompute 0 --seed 5)

same_sum() { # COMMAND...: what stands before the flags
    local sum
    run 0 "$@" "${flags[@]}" --out o
    sum=$(cat o/latest/model.safetensors o/latest/optimizer.safetensors | sha256sum)
    sum=${sum%% *}
    [ "$sum" = "$want" ] || no "the checkpoint's sha256 is $sum"
    log o >log
    [ -e "$work/log" ] || cp log "$work/log"
    cmp -s log "$work/log" || no "another log: $(diff log "$work/log" | tail -n 1)"
}

# A build with other settings, in a folder of its own under build/: says which. Without CUDA, which is
# the same object in every build.
built() { # MAKE'S SETTINGS...
    local folder
    set -- "$@" CUDA=0
    folder=$($MAKE --no-print-directory -s --eval='folder: ; @echo $(B)' folder "$@" \
        2>"$work/make.log") ||
        skip "$(grep -v '^make' "$work/make.log" | tail -n 1)"
    $MAKE --no-print-directory "$folder/train_moe" "$@" >"$work/make.log" 2>&1 ||
        no "does not build: $(grep -E 'error:|undefined reference' "$work/make.log" | head -n 1)"
    echo "$root/$folder/train_moe"
}
build() { # [-e EMULATOR] MAKE'S SETTINGS...
    local emulator= program status=0
    if [ "$1" = -e ]; then emulator=$2 && shift 2; fi
    program=$(cd "$root" && built "$@" 2>&1) || status=$?
    [ $status = 0 ] || { echo "$program" | tail -n 1; exit $status; }
    same_sum $emulator "$program"
}
compiler() { # NAME MAKE'S SETTINGS...
    command -v "$1" >/dev/null || skip "no $1 here"
    build CC="$1" "${@:2}"
}

has_cpu() { # FLAG...: of /proc/cpuinfo
    local flag
    for flag; do grep -qsw "$flag" /proc/cpuinfo || return 1; done
}
x86() {
    case $($CC -dumpmachine) in
        x86_64-* | amd64-*) ;;
        *) skip "not an x86-64 machine" ;;
    esac
}
avx512=(avx512f avx512vl avx512dq avx512bw)

threads() { same_sum "$TRAIN" train --threads "$1"; }
for t in 1 2 3 8; do check builds/threads_$t threads $t; done

on_san && exit 0 # one sanitizer build is enough: the others are the same here as without

vector_width() { # the width of vectors that this machine does not have
    x86
    has_cpu avx2 || skip "no AVX2 here"
    build CC="$CC" "CPPFLAGS=-DGEMM_VBYTES=$1"
}
wide() {
    x86
    has_cpu "${avx512[@]}" || skip "no AVX-512 in this machine"
    build CC="$CC" "CPPFLAGS=-march=x86-64-v3 ${avx512[*]/#/-m}"
}
avx2() {
    x86
    has_cpu "${avx512[@]}" || skip "no AVX-512 in this machine: the native build is this one"
    build CC="$CC" CPPFLAGS=-march=x86-64-v3
}
generic() {
    x86
    build CC="$CC" CPPFLAGS=-march=x86-64
}
check builds/gcc_O2 compiler gcc CFLAGS=-O2
gcc_is_cc() { [ "$($CC -v 2>&1 | tail -n 1)" = "$(gcc -v 2>&1 | tail -n 1)" ]; }
gcc_is_cc || check builds/gcc_O3 compiler gcc # else it is the build above
check builds/gcc_O1_no_vectors compiler gcc "CFLAGS=-O1 -fno-tree-vectorize"
check builds/clang_O3 compiler clang
check builds/vectors_of_64_bytes vector_width 64
check builds/avx512 wide
check builds/avx2 avx2
check builds/generic_x86_64 generic
check builds/no_openmp build CC="$CC" OPENMP=0
check builds/portable build CC="$CC" PORTABLE=1

# An ARM build in an emulator. Its libraries come from Debian's arm64 packages, unpacked under
# build/, without touching the system.
arm64_libraries() { # FOLDER
    local d=$1 option
    [ ! -e "$d/ready" ] || return 0
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || skip "no apt-get here"
    rm -rf "$d"
    mkdir -p "$d/lists/partial" "$d/cache/archives/partial" "$d/root"
    option=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root
        -o Dir::State::lists="$d/lists" -o Dir::Cache="$d/cache" -o Dir::State::status=/dev/null)
    (cd "$d" && timeout 120 apt-get "${option[@]}" -q update &&
        timeout 120 apt-get "${option[@]}" -q download libjansson-dev libjansson4 libstb-dev) \
        >"$d/log" 2>&1 || skip "the arm64 packages cannot be had: $(tail -n 1 "$d/log")"
    for option in "$d"/*.deb; do
        dpkg-deb -x "$option" "$d/root" || skip "cannot unpack $option"
    done
    rm -rf "$d/lists" "$d/cache"
    : >"$d/ready"
}
arm64() {
    local d="$root/build/arm64-libraries" qemu
    command -v aarch64-linux-gnu-gcc >/dev/null || skip "no aarch64-linux-gnu-gcc here"
    qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) || skip "no qemu-aarch64 here"
    arm64_libraries "$d"
    # relative to the root: the name of the build must not depend on where it lies
    d=${d#"$root/"}
    build -e "$qemu" CC=aarch64-linux-gnu-gcc "CPPFLAGS=-isystem $d/root/usr/include" \
        "LDFLAGS=-static -L$d/root/usr/lib/aarch64-linux-gnu"
}
case $(uname -m) in
    aarch64 | arm64) ;; # every build above is one
    *) check builds/arm64 arm64 ;;
esac
