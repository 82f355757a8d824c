#!/usr/bin/env bash
# lane: builds
# The CUDA build where nvcc is, with or without a GPU: moe_kernels.cu compiles without a warning, no
# kernel spills, the bf16 products have matrix instructions and 16-byte accesses, the program says that
# there is no device where there is none, and works as ever on the CPU. Also what make says of CUDA, and
# that no operation waits for the device. `make gpu-check` is for what needs a GPU.
. "$(dirname "$0")/testing.sh"

nvcc=$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc)
# One architecture, the oldest, and little optimisation of what is not the kernels: a minute or so.
settings=(CC="$CC" CUDA=1 CUDA_ARCH=80 CFLAGS=-O1)
make_logged() { # WORDS OF MAKE...
    (cd "$root" && $MAKE --no-print-directory "$@") >"$work/make.log" 2>&1
}
folder() { # B or CUDA_DIR
    (cd "$root" && $MAKE --no-print-directory -s --eval="folder: ; @echo \$($1)" folder "${settings[@]}")
}

built() {
    local program
    [ "$nvcc" ] || skip "no nvcc here"
    program=$root/$(folder B)/train_moe || no "make does not say its folder"
    make_logged "${program#"$root/"}" "${settings[@]}" ||
        no "does not build: $(grep -E 'error:|warning:|undefined|Error' "$work/make.log" | head -n 1)"
    # what nvcc and ptxas say is kept beside the object; the command itself has the word too
    ! grep -iE 'warning( #|:)' "$work/make.log" "$root"/build/cuda-80/ptxas.log >warned ||
        no "nvcc warns: $(head -n 1 warned)"
    if grep -q 'NCCL on' "${program%/*}/config.mk"; then # the calls and their kernel are in it
        nm "$program" >symbols
        ldd "$program" >libraries
        said ' T comm_cuda_reduce$' symbols
        said libnccl libraries
    fi
    text 100 >text
    run 2 env CUDA_VISIBLE_DEVICES= "$program" --input text --out o --device cuda
    refused '--device cuda: expected one that works, found: ' '--device cpu always does'
    [ ! -e o ] || no "a refused run made its folder"
    run 0 "$program" --input text --out o --layers 1 --d-model 16 --heads 2 --seq 16 --batch 2 \
        --steps 2 --warmup 1 --eval-every 0 --sample-every 0
    # nothing is compiled again that did not change
    make_logged "${program#"$root/"}" "${settings[@]}" || no "does not build again"
    ! grep -q 'moe_kernels' "$work/make.log" || no "the kernels are compiled again"
}
report() {
    [ "$nvcc" ] || skip "no nvcc here"
    (cd "$root" && $MAKE --no-print-directory kernel-report "${settings[@]}") >stdout 2>stderr ||
        no "exit status $?: $(grep -E '[1-9][0-9]* spill' stdout stderr || tail -n 1 stderr)"
    said '^sm_80 +regs +spill +smem +threads +occupancy' stdout
    said '^[1-9][0-9]* kernels, 0 spill$' stdout
    awk '/^sm_/ { table = 1; next } !NF { table = 0 } table && NF < 7 { bad = 1 } END { exit bad }' stdout ||
        no "an odd line in the table"
    ! grep -E '[0-9]\?' stdout || no "a kernel without __launch_bounds__"
    # three stages of 128 x 40 values of A and of B, or 128 x 132 sums: the larger
    said '^product<bf16, 128x128, NT, STORE, true> +[0-9]+ +0 +67584 +256 ' stdout
}
# What the PTX of FOLDER lacks in the products of bf16, in every form, epilogue and tile: the last
# template argument says whether rows consist of whole 16 bytes. Where they do not, tiles still leave
# shared memory 16 bytes a lane, through ldmatrix.
products_lack() { # FOLDER
    cat "$1"/*.ptx | awk '
        function out() {
            if (name !~ /^_Z[0-9]+product_kernelI13__nv_bfloat16/) return
            products++
            if (!mma) print name ": no mma.sync"
            if (!matrices) print name ": no ldmatrix of 16 bytes a lane"
            if (name ~ /Lb1EEv/ && !copies) print name ": no cp.async of 16 bytes"
            if (name ~ /Lb1EEv/ && !stores) print name ": no store of 16 bytes"
            if (name ~ /Lb1EEv/ && narrow) print name ": a store of 16 bytes in pieces"
        }
        /\.entry / { out(); name = $0; sub(/.*\.entry +/, "", name); sub(/[ (].*/, "", name)
                     mma = matrices = copies = stores = narrow = 0 }
        /mma\.sync\..*bf16/ { mma++ }
        /ldmatrix\.sync.*\.x4/ { matrices++ }
        /cp\.async\.c[ga]\.shared.*, *16[,;]/ { copies++ }
        /st(\.global)?\.v4\.(b32|u32|f32)/ { stores++ }
        /st(\.global)?\.v2\.(b16|u16)/ { narrow++ }
        END { out(); if (products + 0 < 18) print products + 0 " products of bf16, expected 18" }'
}
ptx() {
    local lacks entry change
    [ "$nvcc" ] || skip "no nvcc here"
    mkdir f
    cp "$root/$(folder CUDA_DIR)"/*.ptx f/k.ptx || no "not one PTX beside the kernels"
    lacks=$(products_lack f)
    [ -z "$lacks" ] || no "$(wc -l <<<"$lacks") times, first: $(head -n 1 <<<"$lacks")"
    # and that this sees it when one of them lacks something
    entry=$(sed -nE 's/.*\.entry (_Z[0-9]+product_kernelI13__nv_bfloat16.*Lb1EEv[^(]*)\(.*/\1/p' f/k.ptx |
        head -n 1)
    mkdir g
    for change in 's/mma\.sync/fma/' 's/ldmatrix\.sync/ld/' 's/cp\.async\.cg/ld/' 's/st\.v4\.b32/st.b32/' \
        's/st\.v4\.b32/st.v2.u16/'; do
        sed "/\.entry $entry(/,/\.entry /$change" f/k.ptx >g/k.ptx
        lacks=$(products_lack g)
        [[ $lacks == "$entry: "* ]] || no "nothing is said of $change in $entry"
    done
}
# A step can be one graph of launches: nothing in it waits for the device, copies to the host or
# allocates, but what the memory section hands out, and what measures the device.
no_waiting() {
    local calls='cuda(Malloc|Free|Memcpy|(Device|Stream|Event)Synchronize|MemGetInfo)'
    sed -n '/^\/\/ memory$/,$!p' "$root/moe_kernels.cu" >kernels
    [ -s kernels ] && [ "$(wc -l <kernels)" != "$(wc -l <"$root/moe_kernels.cu")" ] || no "no such section"
    ! grep -nE "\b$calls" kernels || no "waits: $(grep -m 1 -E "\b$calls" kernels)"
    ! grep -nE '\b(to_host|to_device|sync_device|device_alloc|device_release|peak)\(' kernels ||
        no "an operation calls the memory section"
    [ "$(grep -cE "\b$calls" "$root/moe_kernels.cu")" -ge 6 ] || no "the pattern finds nothing"
}
# The report finds what it is for.
report_of_spills() {
    mkdir f
    printf "ptxas info    : Compiling entry function '%s' for 'sm_%s'\n    0 bytes stack frame, %d bytes spill stores, %d bytes spill loads\nptxas info    : Used %d registers, used 1 barriers, %d bytes smem, 400 bytes cmem[0]\n" \
        one 90 0 0 64 1024 two 90 8 12 255 0 _Z5threeIL4Kind1EEvv 80 0 0 32 0 >f/ptxas.log
    printf '.target sm_90, texmode\n.visible .entry one(\n)\n.maxntid 128, 1, 1\n{\n// dynamic shared memory: 65536\n mma.sync.aligned.m16n8k16 {a};\n cp.async.cg.shared.global [a], [b], 16;\n}\n.visible .entry two(\n)\n{\n}\n' >f/k.ptx
    echo 'enum Kind { PLAIN, // of two' >k.cu
    echo '    ODD };' >>k.cu
    run 1 bash "$root/data/kernel_report.sh" k.cu f
    said '^3 kernels, 1 spill$' stdout
    # 66,560 and a kilobyte of 233,472 bytes: 3 blocks of 4 warps, of 64
    said '^one +64 +0 +66560 +128 +19% +1 +1$' stdout
    # 255 registers: 8 warps take 65,536, one block of 256 threads
    said '^two +255 +20 +0 +256\? +12% +0 +0$' stdout
    said '^(three<ODD>|_Z5three[A-Za-z0-9]*) +32 +0 +0 +256\? +100% ' stdout
    : >f/ptxas.log
    run 2 bash "$root/data/kernel_report.sh" k.cu f
    said 'ptxas.log: expected'
}
what_make_says() {
    local goal
    goal="--eval=said: ; @echo '\$(FOUND)'"
    (cd "$root" && $MAKE --no-print-directory -s "$goal" said CC="$CC" CUDA=0) >stdout 2>stderr ||
        no "$(tail -n 1 stderr)"
    said 'C\+\+ (on|off \(no emulated device\)), CUDA off$' stdout
    (cd "$root" && $MAKE --no-print-directory -s "$goal" said CC="$CC" CUDA=1 NVCC=/no/nvcc) \
        >stdout 2>stderr && no "CUDA=1 without nvcc is no error"
    said 'CUDA=1: no nvcc' stderr
    run 2 "$MAKE" --no-print-directory -C "$root" emulated CC="$CC" CXX=/no/c++ CUDA=0
    said '^emulated: /no/c\+\+ compiles no C\+\+17 here'
}
# gpu-check says of itself that there is no GPU; a step that fails is counted, one that hangs is ended.
no_gpu() {
    mkdir bin
    printf '#!/bin/sh\necho "No devices were found" >&2\nexit 6\n' >bin/nvidia-smi
    chmod +x bin/nvidia-smi
    run 2 env PATH="$PWD/bin:$PATH" bash "$root/data/gpu_check.sh"
    [ "$(<stderr)" = 'gpu-check: no GPU here: nvidia-smi finds none' ] || no "said: $(<stderr)"
    printf '#!/bin/sh\necho "A GPU, 1.0"\n' >bin/nvidia-smi
    printf '#!/bin/sh\ncase "$*" in "diff "*bf16) echo "FAIL one: off"; exit 0 ;; parity*) exit 3 ;; esac\n' \
        >bin/program
    cp bin/program bin/compute-sanitizer
    chmod +x bin/program bin/compute-sanitizer
    run 0 env PATH="$PWD/bin:$PATH" bash "$root/data/gpu_check.sh"
    run 2 env PATH="$PWD/bin:$PATH" bash "$root/data/gpu_check.sh" 'CUDA off'
    said 'built without CUDA'
    run 1 env PATH="$PWD/bin:$PATH" TRAIN="$PWD/bin/program" TEST="$PWD/bin/program" \
        bash "$root/data/gpu_check.sh" 'CUDA on (sm_10)'
    said '^diff/fp32 +ok' stdout
    said '^diff/bf16 +FAIL .*FAIL one: off' stdout
    said '^parity +FAIL .*status 3' stdout
    said '^devices +FAIL' stdout # whose programs do nothing at all
    said '^sanitizer/memcheck +ok' stdout
    said '^gpu-check: 9 steps, 3 failed' stdout
}
check cuda/what_make_says what_make_says
check cuda/report_of_spills report_of_spills
check cuda/gpu_check no_gpu
check cuda/no_waiting no_waiting
on_san && { echo "skip cuda/built: this is a sanitizer build"; exit 0; }
check cuda/built built
check cuda/kernel_report report
check cuda/ptx ptx
