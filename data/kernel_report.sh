#!/usr/bin/env bash
# What the compiler made of every CUDA kernel: data/kernel_report.sh SOURCE FOLDER, where FOLDER holds
# ptxas.log and the PTX that `make kernel-report` has nvcc leave there. One table for each architecture:
#
#     regs        registers a thread
#     spill       bytes a thread that registers had no room for, stores and loads together
#     smem        bytes of shared memory a block: what the compiler knows, and what the kernel says
#                 with takes_shared (moe_kernels.cu) of its launch; + where that depends on the model
#     threads     of a block, from __launch_bounds__; without them 256 are assumed, and marked ?
#     occupancy   warps that fit a multiprocessor, of the most there can be, by those four; 0%: a
#                 block takes more shared memory than there is
#     mma, 16 B   matrix instructions and 16-byte accesses (also cp.async, ldmatrix) in its PTX
#
# TileShape<BM, BN, ...> is shown as BMxBN; enumerators by their names in SOURCE. The limits of an
# architecture are those of the CUDA programming guide, table of compute capabilities. Exit status 1
# when a kernel spills.
set -uo pipefail
export LC_ALL=C

source=$1 folder=$2
stop() { echo "kernel-report: $*" >&2; exit 2; }
[ -s "$folder/ptxas.log" ] || stop "$folder/ptxas.log: expected what ptxas says, found nothing"
ls "$folder"/*.ptx >/dev/null 2>&1 || stop "$folder: expected the PTX of the kernels, found none"

# s/(Enum)2/NAME/ for every enumerator of SOURCE that templates may have: enum Enum { ... }
enumerators() {
    sed -E 's|//.*||' "$source" | awk '
        /^enum [A-Za-z_]+ \{/ { name = $2; list = ""; inside = 1 }
        inside { list = list $0 }
        inside && /\}/ {
            gsub(/.*\{|\}.*|[ \t]/, "", list)
            n = split(list, value, ",")
            for (i = 1; i <= n; i++) printf "s/\\(%s\\)%d([,>])/%s\\1/g\n", name, i - 1, value[i]
            inside = 0
        }'
}
# A template's name as a reader would say it: product<bf16, 128x128, NT, GLU, true>.
short() {
    if command -v c++filt >/dev/null; then c++filt; else cat; fi |
        sed -E "$(enumerators)" |
        sed -E 's/^void //; s/\(anonymous namespace\):://g; s/__nv_bfloat16/bf16/g; s/__half/fp16/g
            s/TileShape<([0-9]+), ([0-9]+)(, [0-9]+)*>/\1x\2/g; s/_kernel([<(]|$)/\1/
            s/\((int|unsigned int|bool|[A-Za-z_]*)\)([0-9])/\2/g; s/\(.*//; s/ +>/>/g'
}

{
    # of each entry of each PTX: threads, matrix instructions, 16-byte accesses, what it says of
    # dynamic shared memory
    awk '
        function out() {
            if (name != "") print "ptx", arch, name, threads + 0, mma + 0, wide + 0, dynamic
        }
        FNR == 1 { out(); name = ""; delete external }
        /^\.target / { arch = $2; gsub(/sm_|,.*/, "", arch) }
        /^\.extern \.shared / { x = $NF; sub(/\[.*/, "", x); external[x] }
        /\.entry / { out(); name = $0; sub(/.*\.entry +/, "", name); sub(/[ (].*/, "", name)
                     threads = mma = wide = 0; dynamic = "none" }
        dynamic == "none" { for (x in external) if ($0 ~ "[ ,[]" x "[],;+]") dynamic = "unsaid" }
        /\/\/ dynamic shared memory: / { dynamic = $NF }
        /^\.(maxntid|reqntid)/ { gsub(/,/, " "); threads = $2 * ($3 ? $3 : 1) * ($4 ? $4 : 1) }
        /mma\.sync|wgmma\.mma/ { mma++ }
        /(ld|st)(\.(global|shared)[a-z0-9.:]*)?\.v4\.(f32|b32|u32|s32)/ { wide++ }
        /(ld|st)(\.(global|shared)[a-z0-9.:]*)?\.v2\.(f64|b64|u64|s64)/ { wide++ }
        /cp\.async\.c[ga]\.shared.*, *16[,;]/ { wide++ }
        /ldmatrix\.sync.*\.x4/ { wide++ } # a lane reads the 16 bytes of a row
        END { out() }' "$folder"/*.ptx
    awk -F"'" '
        function out() { if (name != "") print "used", arch, name, regs, spill + 0, smem + 0 }
        /Compiling entry function/ { out(); name = $2; arch = $4; sub(/sm_/, "", arch)
                                     regs = spill = smem = 0 }
        /bytes spill stores/ { n = split($0, w, " ")
            for (i = 1; i < n; i++) if (w[i + 2] == "spill") spill += w[i] }
        /Used [0-9]+ registers/ { n = split($0, w, /[ ,]+/)
            for (i = 1; i <= n; i++) {
                if (w[i + 1] ~ /^registers/) regs = w[i]
                if (w[i + 2] == "smem") smem = w[i]
            } }
        END { out() }' "$folder/ptxas.log" | sort -k2,2n -k3,3
} >"$folder/report.raw"
[ "$(grep -c '^used ' "$folder/report.raw")" != 0 ] || stop "$folder/ptxas.log names no kernel"

paste -d '\t' "$folder/report.raw" \
    <(awk '{ print $1 == "used" ? $3 : "-" }' "$folder/report.raw" | short) |
    awk -F'\t' '
        BEGIN { # warps, bytes of shared memory and blocks of a multiprocessor
            split("75 32 65536 16;80 64 167936 32;86 48 102400 16;87 48 167936 16;88 48 102400 24;" \
                "89 48 102400 24;90 64 233472 32;100 64 233472 32;103 64 233472 32;" \
                "110 48 233472 24;120 48 102400 24;121 48 102400 24", row, ";")
            for (i in row) { split(row[i], w, " "); limit[w[1]] = row[i] }
        }
        function ceil(x, step) { return int((x + step - 1) / step) * step }
        function least(a, b) { return a < b ? a : b }
        { split($1, f, " ") }
        f[1] == "ptx" {
            threads[f[2], f[3]] = f[4]; mma[f[2], f[3]] = f[5]; wide[f[2], f[3]] = f[6]
            dynamic[f[2], f[3]] = f[7]
            next
        }
        {
            arch = f[2]; name = f[3]
            if (arch != before) {
                printf "%ssm_%-42s %4s %5s %8s %8s %9s %5s %5s\n", before == "" ? "" : "\n", arch,
                    "regs", "spill", "smem", "threads", "occupancy", "mma", "16 B"
                before = arch
            }
            block = threads[arch, name] ? threads[arch, name] : 256
            smem = f[6] + dynamic[arch, name]
            occupancy = "?"
            if ((arch + 0) in limit) {
                split(limit[arch + 0], w, " ")
                warps = ceil(block, 32) / 32
                # registers are given out by the warp, 256 at a time; a block takes a kilobyte itself
                byregs = int(int(65536 / ceil(f[4] * 32, 256)) / warps)
                bysmem = smem ? int(w[3] / (ceil(smem, 128) + (arch >= 80 ? 1024 : 0))) : 99
                blocks = least(least(byregs, bysmem), least(int(w[2] / warps), w[4]))
                occupancy = sprintf("%.0f%%", 100 * blocks * warps / w[2])
            }
            printf "%-45s %4d %5d %7d%s %7d%s %9s %5d %5d\n", $2, f[4], f[5], smem,
                dynamic[arch, name] == "unsaid" ? "+" : " ", block, threads[arch, name] ? " " : "?",
                occupancy, mma[arch, name], wide[arch, name]
            spills += f[5] > 0
            kernels++
        }
        END {
            printf "\n%d kernels, %d spill\n", kernels, spills
            exit spills > 0
        }'
