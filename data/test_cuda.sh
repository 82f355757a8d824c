#!/usr/bin/env bash
# The CUDA build where nvcc is, with or without a GPU: moe_kernels.cu compiles without a warning, no
# kernel spills, the program says that there is no device where there is none, and works as ever on the
# CPU. Also what make says of CUDA. `make gpu-check` is for what needs a GPU.
. "$(dirname "$0")/testing.sh"

nvcc=$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc)
# One architecture, and little optimisation of what is not the kernels: a minute at most.
settings=(CC="$CC" CUDA=1 CUDA_ARCH=90 CFLAGS=-O1)
make_logged() { # WORDS OF MAKE...
    (cd "$root" && $MAKE --no-print-directory "$@") >"$work/make.log" 2>&1
}
folder() {
    (cd "$root" && $MAKE --no-print-directory -s --eval='folder: ; @echo $(B)' folder "${settings[@]}")
}

built() {
    local program
    [ "$nvcc" ] || skip "no nvcc here"
    program=$root/$(folder)/train_moe || no "make does not say its folder"
    make_logged "${program#"$root/"}" "${settings[@]}" ||
        no "does not build: $(grep -E 'error|warning|undefined' "$work/make.log" | head -n 1)"
    ! grep -iE 'warning' "$work/make.log" || no "nvcc warns: $(grep -i warning "$work/make.log" | head -n 1)"
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
    said '^sm_90 +regs +spill +smem +threads +occupancy' stdout
    said '^[1-9][0-9]* kernels, 0 spill$' stdout
    awk '/^sm_/ { table = 1; next } !NF { table = 0 } table && NF < 7 { bad = 1 } END { exit bad }' stdout ||
        no "an odd line in the table"
}
# The report finds what it is for.
report_of_spills() {
    mkdir f
    printf "ptxas info    : Compiling entry function '%s' for 'sm_%s'\n    0 bytes stack frame, %d bytes spill stores, %d bytes spill loads\nptxas info    : Used %d registers, used 1 barriers, %d bytes smem, 400 bytes cmem[0]\n" \
        one 90 0 0 64 1024 two 90 8 12 255 0 two 80 0 0 32 0 >f/ptxas.log
    printf '.target sm_90, texmode\n.visible .entry one(\n)\n.maxntid 128, 1, 1\n{\n mma.sync.aligned.m16n8k16 {a};\n cp.async.cg.shared.global [a], [b], 16;\n}\n.visible .entry two(\n)\n{\n}\n' >f/k.ptx
    echo '// kernel-report: one 65536' >k.cu
    run 1 bash "$root/data/kernel_report.sh" k.cu f
    said '^3 kernels, 1 spill$' stdout
    # 66,560 and a kilobyte of 233,472 bytes: 3 blocks of 4 warps, of 64
    said '^one +64 +0 +66560 +128 +19% +1 +1$' stdout
    # 255 registers: 8 warps take 65,536, one block of 256 threads
    said '^two +255 +20 +0 +256\? +12% +0 +0$' stdout
    said '^two +32 +0 +0 +256\? +100% ' stdout
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
on_san && { echo "skip cuda/built: this is a sanitizer build"; exit 0; }
check cuda/built built
check cuda/kernel_report report
