# Builds train_moe (the trainer and its other commands) and its tests: test_moe (what it computes),
# test_golden (the same beside transformers), test_files (what it reads and writes), test_tokens
# (text to tokens), test_fuzz (hostile files), test_comm (ranks). `make help` lists the targets.
#
# Objects and programs live in build/NAME, one folder for each compiler and set of flags, so that
# builds never mix: build/cc, build/clang, build/cc-san, build/cc-portable. The programs are linked
# from there to the root. What the compiler can do, and which libraries there are, is found once by
# compiling and linking small probes, and kept in build/NAME/config.mk; `make clean` forgets it.
#
# moe_kernels.cu, the CUDA twin of moe_cpu.c, is compiled twice: by nvcc, once for all builds
# (build/cuda-ARCHITECTURES), and through cuda_cpu.h by an ordinary C++ compiler, as the device
# `emulated`, which test_moe has wherever there is a C++ compiler and train_moe in `make emulated`.

# ---- settings, on the command line: `make CC=clang SAN=1 test` -----------------------------------
CC       ?= cc
CXX      ?=# for the emulated device; otherwise the C++ compiler that belongs to CC
CFLAGS   ?= -O3 -g# optimisation only: what the numbers need is in NUMERICS below
CPPFLAGS ?=# -isystem DIR, for headers in unusual places
LDFLAGS  ?=# -L DIR
WARNINGS ?= -Wall -Wextra -Werror
PORTABLE ?=# 1: no -march=native; on x86-64 one program, which picks AVX2 or AVX-512 at start
SAN      ?=# 1: address and undefined-behaviour sanitizers
OPENMP   ?= 1# 0: build without, even where it is there
PCRE2    ?= 1# the same
MPI      ?= 1# the same: ranks; found through mpicc, whose flags go to CC
CUDA     ?=# 1: CUDA kernels, wherever nvcc is; 0: none; otherwise where there is a GPU too
CUBLAS   ?= 1# 0: without it, even where it is there
NCCL     ?= 1# 0: without it: ranks with GPUs then speak through host memory
CUDA_ARCH ?=# "80 90": for these; otherwise for the GPUs here, else sm_80, sm_90 and nvcc's newest
NVCC     ?=# nvcc, where it is neither in the PATH nor in /usr/local/cuda/bin
NVCCFLAGS ?= -O3 -lineinfo
TEXT     ?=# a text file or folder for `make train`, instead of the fetched texts
FUZZ_S   ?= 60# seconds of `make fuzz` for each target
ONLY     ?=# one mutant of `make mutate`, or one group of them

# The same bits from gcc and clang, at any optimisation level: no contraction of a*b+c (gemm.h asks
# for fused multiply-adds where it wants them), nothing from the -ffast-math family.
# -fno-math-errno only lets sqrt and fma, which are correctly rounded either way, become
# instructions; exp, log, sin and cos are our own.
NUMERICS := -std=gnu11 -ffp-contract=off -fno-math-errno

# make's own CXX knows nothing of CC: objects of both are linked, with the sanitizers of one.
ifneq ($(filter default undefined,$(origin CXX))$(if $(CXX),,none),)
CXX := $(if $(findstring clang,$(CC)),$(subst clang,clang++,$(CC)),$(if \
    $(findstring gcc,$(CC)),$(subst gcc,g++,$(CC)),$(patsubst %cc,%c++,$(CC))))
OWN_CXX :=
else
OWN_CXX := CXX=$(CXX)
endif

REFUSED := -Ofast -ffast-math -ffinite-math-only -funsafe-math-optimizations# in CFLAGS
REFUSED := $(filter $(REFUSED),$(CFLAGS))
ifneq ($(REFUSED),)
$(error $(REFUSED) in CFLAGS changes results and hides NaN: leave it out)
endif

# ---- names ---------------------------------------------------------------------------------------
MAKEFLAGS += -r --no-print-directory
.SUFFIXES:
.DELETE_ON_ERROR:
empty :=
space := $(empty) $(empty)
comma := ,
hash  := \#

# A setting that is on, off, and the others that give a build a folder of its own.
on     = $(filter-out 0 no off,$(strip $(1)))
off    = $(if $(on),,off)
CUSTOM := $(strip $(filter-out -O3 -g,$(CFLAGS)) $(CPPFLAGS) $(LDFLAGS) $(OWN_CXX) $(NVCC) \
    $(CUDA_ARCH))
NAME   := $(subst /,_,$(subst $(space),_,$(strip $(CC))))
NAME   := $(NAME)$(if $(call on,$(SAN)),-san)$(if $(call on,$(PORTABLE)),-portable)
NAME   := $(NAME)$(if $(call off,$(OPENMP)),-no-openmp)$(if $(call off,$(PCRE2)),-no-pcre2)
NAME   := $(NAME)$(if $(call off,$(MPI)),-no-mpi)
NAME   := $(NAME)$(if $(CUDA),$(if $(call on,$(CUDA)),-cuda,-no-cuda))
NAME   := $(NAME)$(if $(call off,$(CUBLAS)),-no-cublas)$(if $(call off,$(NCCL)),-no-nccl)
NAME   := $(NAME)$(if $(CUSTOM),-$(firstword $(shell printf '%s' '$(CUSTOM)' | cksum)))
B      := build/$(NAME)
E      := $(B)-emulated
M      := $(B)-mutate
CONFIG := $(B)/config.mk

ifneq ($(call on,$(SAN)),)
MODE := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
endif

.PHONY: all programs emulated gpu-check gpu-check-run kernel-report kernel-report-run plot lint \
    fuzz fuzz-run mutate train train-run test test-run deps deps-all format clean help FORCE
all:

# ---- probes --------------------------------------------------------------------------------------
# `links HEADER CODE FLAGS` succeeds when a program that includes HEADER and runs CODE compiles and
# links with FLAGS; `accepts FLAG` when the compiler takes the flag. A new library is one line here
# and one in the rule below; if it is needed, one more in MISSING.
PROBES = tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	links() { printf '$(hash)include <%s>\nint main(void) { %s return 0; }\n' "$$1" "$$2" | \
	    $(CC) $(CPPFLAGS) $(MODE) -x c - -o "$$tmp/probe" $(LDFLAGS) $$3 >/dev/null 2>&1; }; \
	accepts() { links stddef.h '' "$$1 -Werror"; }; \
	compiler() { links stdio.h 'puts("");' ''; }; \
	jansson() { links jansson.h 'json_decref(NULL);' -ljansson; }; \
	stb() { links stb/stb_ds.h '' ''; }; \
	pcre2() { links pcre2.h 'pcre2_code_free(NULL);' '-DPCRE2_CODE_UNIT_WIDTH=8 -lpcre2-8'; }; \
	mpi_cflags() { mpicc -show 2>/dev/null | tr ' ' '\n' | sed -n 's/^-I/-isystem /p; /^-D/p'; }; \
	mpi_libs() { mpicc -show 2>/dev/null | tr ' ' '\n' | grep -E '^-(L|l|Wl,|pthread)'; }; \
	mpi() { [ '$(call on,$(MPI))' ] && \
	    links mpi.h 'MPI_Init(NULL, NULL);' "$$(mpi_cflags) $$(mpi_libs)"; }; \
	openmp() { [ '$(call on,$(OPENMP))' ] && \
	    links omp.h 'return omp_get_max_threads() < 1;' -fopenmp; }; \
	cxx() { printf 'int main() { if constexpr (sizeof(int) > 1) return 0; else return 1; }\n' \
	        >"$$tmp/probe.cpp" && printf x | sed -z -E 's/x/y/' >/dev/null 2>&1 && \
	    $(CXX) -std=c++17 $(CPPFLAGS) $(MODE) $$1 "$$tmp/probe.cpp" -o "$$tmp/probe" $(LDFLAGS) \
	        >/dev/null 2>&1; }; \
	find_nvcc() { for n in $(or $(NVCC),nvcc /usr/local/cuda/bin/nvcc); do \
	    command -v $$n && break; done; }; \
	gpus() { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
	    grep -xE '[0-9]+\.[0-9]' | tr -d . | sort -nu | tr '\n' ' '; }; \
	newest() { "$$1" --list-gpu-arch 2>/dev/null | sed -n 's/^compute_\([0-9]*\)$$/\1/p' | \
	    sort -n | tail -n 1; }; \
	cuda() { printf '__global__ void k() {}\nint main() { k<<<1, 1>>>(); return 0; }\n' \
	        >"$$tmp/probe.cu" && \
	    cudalib="$$("$$1" --dryrun -c "$$tmp/probe.cu" -o "$$tmp/probe.o" 2>&1 | \
	        sed -n 's/.*LIBRARIES= *//p' | tr -d '"') -lcudart_static -ldl -lrt -lpthread" && \
	    "$$1" -std=c++17 --threads=0 $$2 -c "$$tmp/probe.cu" -o "$$tmp/probe.o" >/dev/null 2>&1 && \
	    $(CXX) "$$tmp/probe.o" -o "$$tmp/probe" $(LDFLAGS) $$cudalib >/dev/null 2>&1; }; \
	cublas() { [ '$(call on,$(CUBLAS))' ] && { echo '$(hash)include <cublas_v2.h>'; \
	        echo 'int main() { return cublasCreate(nullptr); }'; } >"$$tmp/probe.cu" && \
	    "$$1" -std=c++17 -c "$$tmp/probe.cu" -o "$$tmp/probe.o" >/dev/null 2>&1 && \
	    $(CXX) "$$tmp/probe.o" -o "$$tmp/probe" $(LDFLAGS) $$cudalib -lcublas >/dev/null 2>&1 && \
	    for l in $$cudalib; do \
	        case $$l in */stubs) ;; -L*) cublaslib="$$cublaslib -Wl,-rpath,$${l$(hash)-L}" ;; esac; \
	    done; }; \
	nccl() { [ '$(call on,$(NCCL))' ] && [ "$$mpi_l" ] && { echo '$(hash)include <nccl.h>'; \
	        echo 'int main() { int v; return ncclGetVersion(&v); }'; } >"$$tmp/probe.cu" && \
	    "$$1" -std=c++17 -c "$$tmp/probe.cu" -o "$$tmp/probe.o" >/dev/null 2>&1 && \
	    $(CXX) "$$tmp/probe.o" -o "$$tmp/probe" $(LDFLAGS) $$cudalib -lnccl >/dev/null 2>&1 && \
	    nccllib="-lnccl$$(for l in $$cudalib; do \
	        case $$l in */stubs) ;; -L*) printf ' -Wl,-rpath,%s' "$${l$(hash)-L}" ;; esac; done)"; }

# CUDA is built in where it can run, for nvcc takes long. Asked for and impossible is an error; found,
# but of no use here, is said. Sanitizers and a GPU's driver want the same addresses: only if asked.
CONFIGURE_CUDA = gpus=; nvcc=; \
	[ '$(if $(CUDA),$(call off,$(CUDA)),$(call on,$(SAN)))' ] || \
	    { gpus=$$(gpus); nvcc=$$(find_nvcc); }; \
	sms='$(CUDA_ARCH)'; \
	[ "$$sms" ] || sms=$$gpus; \
	[ "$$sms" ] || [ -z "$$nvcc" ] || sms="80 90 $$(newest "$$nvcc")"; \
	forced() { [ -z '$(call on,$(CUDA))' ] || stop "CUDA=1: $$*"; }; \
	if [ -z "$$nvcc" ]; then \
	    forced "no nvcc in the PATH or in /usr/local/cuda/bin; NVCC=PATH names it"; \
	    [ -z "$$gpus" ] || cudasaid='off (a GPU, but no nvcc)'; \
	    sms=; \
	elif [ -z "$${gpus}$(call on,$(CUDA))" ]; then \
	    cudasaid='off (nvcc, but no GPU; CUDA=1 builds it)'; sms=; \
	elif [ "$$cxx" ] && cuda "$$nvcc" -arch=sm_$${sms%% *}; then \
	    sms=$$(echo $$sms); cudasaid="on (sm_$$(echo $$sms | sed 's/ /, sm_/g'))"; \
	    cublas "$$nvcc" && cudasaid="$$cudasaid, cuBLAS on" && cublas=1 || \
	        cudasaid="$$cudasaid, cuBLAS off"; \
	    nccl "$$nvcc" && cudasaid="$$cudasaid, NCCL on" || cudasaid="$$cudasaid, NCCL off"; \
	else \
	    forced "$$nvcc and $(CXX) cannot compile and link a program for sm_$${sms%% *}"; \
	    cudasaid="off ($$nvcc and $(CXX) make no program)"; sms=; \
	fi

# What is missing is said by the file itself, which goes away as it is read: the next make looks
# again.
$(CONFIG): Makefile
	@mkdir -p $(@D); $(PROBES); \
	stop() { echo "\$$(shell rm -f $@)\$$(error $$1)" >$@; exit 0; }; \
	command -v $(firstword $(CC)) >/dev/null || \
	    stop "no compiler '$(firstword $(CC))': CC=NAME names another, make deps installs one"; \
	compiler || stop "$(CC) $(CPPFLAGS) $(MODE) $(LDFLAGS) cannot compile and link a program"; \
	jansson || stop "jansson.h or its library is missing for $(CC): make deps"; \
	stb || stop "stb/stb_ds.h is missing for $(CC): make deps"; \
	arch=; for a in $(if $(call off,$(PORTABLE)),-march=native -mcpu=native); do \
	    accepts $$a && arch=$$a && break; \
	done; \
	omp=; openmp && omp=-fopenmp; \
	pcre=; [ '$(call on,$(PCRE2))' ] && pcre2 && pcre=-lpcre2-8; \
	cxx=; cxx $$omp && cxx=1; \
	mpi_c=; mpi_l=; mpi && mpi_c=$$(echo $$(mpi_cflags)) && mpi_l=$$(echo $$(mpi_libs)); \
	sms=; cudalib=; cublas=; cublaslib=; nccllib=; cudasaid=off; $(CONFIGURE_CUDA); \
	{ echo "TARGET := $$($(CC) -dumpmachine)"; \
	  echo "ARCH := $$arch"; \
	  echo "OMP := $${omp:--Wno-unknown-pragmas}"; \
	  echo "PCRE2_LIB := $$pcre"; \
	  echo "MPI_CFLAGS := $$mpi_c"; \
	  echo "MPI_LIBS := $$mpi_l"; \
	  echo "FOUND := OpenMP $$([ "$$omp" ] && echo on || echo 'off (one thread)')\$$(comma)"; \
	  echo "FOUND += MPI $$([ "$$mpi_l" ] && echo on || echo 'off (one rank)')\$$(comma)"; \
	  echo "CXX_WORKS := $$cxx"; \
	  echo "CUDA_SMS := $$sms"; \
	  echo "CUDA_NVCC := $$nvcc"; \
	  echo "CUDA_LIBS := $$cudalib$$cublaslib"; \
	  echo "CUBLAS_WORKS := $$cublas"; \
	  echo "NCCL_LIBS := $$nccllib"; \
	  echo "FOUND += PCRE2 $$([ "$$pcre" ] && echo on || \
	      echo 'off (no vocabularies with merges)')\$$(comma)"; \
	  echo "FOUND += C++ $$([ "$$cxx" ] && echo on || echo 'off (no emulated device)')\$$(comma)"; \
	  echo "FOUND += CUDA $$cudasaid"; \
	} >$@.part && mv $@.part $@

# Goals that work on a machine where the probes would fail.
UNCONFIGURED := train test fuzz gpu-check kernel-report deps deps-all lint format clean help
ifneq ($(filter-out $(UNCONFIGURED),$(or $(MAKECMDGOALS),all)),)
include $(CONFIG)
endif

# ---- the programs --------------------------------------------------------------------------------
DEFINES = $(if $(PCRE2_LIB),-DUSE_PCRE2)
COMPILE = $(CC) $(NUMERICS) $(CFLAGS) $(ARCH) $(OMP) $(WARNINGS) $(DEFINES) $(CPPFLAGS) $(MODE) -MMD -MP
LIBS    = $(PCRE2_LIB) -ljansson -lm
LINKER  = $(if $(filter $(CUDA_OBJECT) %/moe_emulated.o,$^),$(CXX),$(CC))
LINK    = $(LINKER) $(CFLAGS) $(ARCH) $(OMP) $(MODE) -o $@ $(filter %.o,$^) $(LDFLAGS) $(LIBS) \
    $(if $(CUDA_OBJECT),$(CUDA_LIBS))

# moe_cpu.c is the CPU backend; in a portable x86-64 build it is there three times, once for each
# instruction set.
CPU := $(B)/moe_cpu.o
ifneq ($(call on,$(PORTABLE)),)
ifneq ($(filter x86_64-% amd64-%,$(TARGET)),)
CPU := $(B)/moe_base.o $(B)/moe_avx2.o $(B)/moe_avx512.o
DISPATCH := -DMOE_DISPATCH
endif
endif

# The devices besides the CPU: which a program has, its commands.h must know. (The environment has no
# say in it: the tests have an EMULATED there.)
CUDA_OBJECT :=
NCCL_OBJECT :=
EMULATED    :=
ifneq ($(CUDA_SMS),)
CUDA_DIR    := build/cuda-$(subst $(space),-,$(CUDA_SMS))$(if $(CUBLAS_WORKS),,-no-cublas)
CUDA_OBJECT := $(CUDA_DIR)/moe_kernels.o
$(B)/train_moe.o $(E)/train_moe.o $(B)/test_moe.o: DEFINES += -DHAVE_CUDA
endif
# Ranks with a GPU each: train_moe.o makes the calls, comm_nccl.o has the one kernel.
ifneq ($(NCCL_LIBS),)
NCCL_OBJECT := $(CUDA_DIR)/comm_nccl.o
$(B)/train_moe.o $(E)/train_moe.o: DEFINES += -DUSE_NCCL -isystem $(dir $(CUDA_NVCC))../include
$(B)/train_moe $(E)/train_moe: LIBS += $(NCCL_LIBS)
endif
ifneq ($(CXX_WORKS),)
EMULATED := $(B)/moe_emulated.o
$(E)/train_moe.o $(B)/test_moe.o $(B)/test_parallel.o: DEFINES += -DHAVE_EMULATED
endif

TESTS    := test_moe test_golden test_files test_tokens test_fuzz test_comm test_parallel $(if $(EMULATED),test_emulated)
PROGRAMS := $(B)/train_moe $(TESTS:%=$(B)/%)
# The root's programs are links to the last build that `make` made; a sanitizer build never takes
# their place, nor does `make test` with settings of its own.
ROOT := $(if $(call on,$(SAN)),,train_moe $(TESTS))

# `make programs` builds without touching the root: for scripts that build a second time.
all: programs $(ROOT)
programs: $(PROGRAMS)
	@echo "$(B): $(strip $(CC) $(ARCH) $(MODE)), $(FOUND)"

$(B)/train_moe: $(B)/train_moe.o $(CPU) $(CUDA_OBJECT) $(NCCL_OBJECT)
	$(LINK)
# The tests measure against moe_f64.o, the same backend in double precision. test_moe diff --with
# compiles a file of its own as moe_cpu.c or moe_kernels.cu is compiled, and loads it.
$(B)/test_moe.o: DEFINES += '-DWITH_CC="$(CC) $(NUMERICS) $(CFLAGS) $(ARCH) $(OMP) $(CPPFLAGS)"' \
    $(if $(EMULATED),'-DWITH_CXX="$(EMULATED_CXX)"') \
    $(if $(CUDA_OBJECT),'-DWITH_NVCC="$(CUDA_NVCC) -std=c++17 $(NVCCFLAGS)"')
$(B)/test_moe: LIBS += -ldl
$(B)/test_moe: $(B)/test_moe.o $(CPU) $(B)/moe_f64.o $(CUDA_OBJECT) $(EMULATED)
	$(LINK)
$(B)/test_golden: $(B)/test_golden.o $(CPU)
	$(LINK)
$(B)/test_files: $(B)/test_files.o
	$(LINK)
$(B)/test_tokens: $(B)/test_tokens.o
	$(LINK)
$(B)/test_fuzz: $(B)/test_fuzz.o
	$(LINK)
$(B)/train_moe.o $(E)/train_moe.o $(B)/test_comm.o $(B)/test_parallel.o: \
    DEFINES += $(if $(MPI_LIBS),-DUSE_MPI $(MPI_CFLAGS))
$(B)/train_moe $(E)/train_moe $(B)/test_comm $(B)/test_parallel: LIBS += $(MPI_LIBS)
$(B)/test_comm: $(B)/test_comm.o
	$(LINK)
$(B)/test_parallel: $(B)/test_parallel.o $(CPU) $(EMULATED)
	$(LINK)

$(B)/%.o: %.c $(CONFIG)
	$(COMPILE) $(DISPATCH) -c $< -o $@
$(B)/moe_f64.o: moe_cpu.c $(CONFIG)
	$(COMPILE) -Dreal=double -Dbackend_cpu=backend_f64 -c $< -o $@
$(B)/moe_base.o: moe_cpu.c $(CONFIG)
	$(COMPILE) -Dbackend_cpu=backend_base -c $< -o $@
$(B)/moe_avx2.o: moe_cpu.c $(CONFIG)
	$(COMPILE) -mavx2 -mfma -Dbackend_cpu=backend_avx2 -c $< -o $@
$(B)/moe_avx512.o: moe_cpu.c $(CONFIG)
	$(COMPILE) -mavx512f -mavx512vl -mavx512dq -mavx512bw -mavx2 -mfma \
	    -Dbackend_cpu=backend_avx512 -c $< -o $@

# ---- the kernels ---------------------------------------------------------------------------------
# At -O1, and -O0 with the sanitizers: compiling is what takes time.
EMULATED_MODE = $(patsubst -O1,-O0,$(MODE))
EMULATED_CXX = $(CXX) -std=c++17 $(filter-out -std=%,$(NUMERICS)) $(patsubst -O3,-O1,$(CFLAGS)) \
    $(ARCH) $(OMP) -Wno-unknown-pragmas $(CPPFLAGS) -I. -include cuda_cpu.h
# On the CPU: launches and shared memory are rewritten by data/cuda_cpu.sed, which says how; the
# rest of CUDA is in cuda_cpu.h. The line numbers are those of the kernels.
EMULATED_SOURCE = { echo '$(hash)line 1 "$<"'; sed -z -E -f data/cuda_cpu.sed $<; } >$@
$(B)/%_cpu.cpp: %.cu data/cuda_cpu.sed $(CONFIG)
	$(EMULATED_SOURCE)
$(B)/moe_emulated.o $(M)/moe_emulated.o: %/moe_emulated.o: \
    %/moe_kernels_cpu.cpp cuda_cpu.h $(CONFIG)
	$(EMULATED_CXX) $(WARNINGS) $(EMULATED_MODE) -MMD -MP -Dbackend_cuda=backend_emulated -c $< -o $@

# The tests of cuda_cpu.h itself.
$(B)/test_emulated.o: $(B)/test_emulated_cpu.cpp cuda_cpu.h $(CONFIG)
	$(EMULATED_CXX) $(WARNINGS) $(MODE) -MMD -MP -c $< -o $@
$(B)/test_emulated: $(B)/test_emulated.o
	$(CXX) $(CFLAGS) $(ARCH) $(OMP) $(MODE) -o $@ $< $(LDFLAGS)

# train_moe with the emulated device: the other objects are those of the ordinary build.
$(E)/train_moe.o: train_moe.c $(CONFIG)
	@mkdir -p $(@D)
	$(COMPILE) $(DISPATCH) -c $< -o $@
$(E)/train_moe: $(E)/train_moe.o $(CPU) $(CUDA_OBJECT) $(EMULATED) $(NCCL_OBJECT)
	$(LINK)
emulated: $(if $(EMULATED),$(E)/train_moe)
	@[ '$(EMULATED)' ] || { echo 'emulated: $(CXX) compiles no C++17 here (or sed knows no -z):' \
	    'CXX=NAME names another, make deps-all installs one' >&2; exit 2; }
	@[ '$(call on,$(SAN))' ] || ln -sfn $(E)/train_moe train_moe_emulated
	@echo "$(E)/train_moe: --device emulated runs moe_kernels.cu on the CPU"

# The kernels with a fault to switch on at every place of data/mutants.tsv, and the tests on them:
# data/mutate.sh says how. The other objects are those of the ordinary build.
$(M)/moe_kernels.cu: moe_kernels.cu data/mutants.tsv data/mutate.sh
	@mkdir -p $(@D)
	bash data/mutate.sh --switch >$@
$(M)/moe_kernels_cpu.cpp: $(M)/moe_kernels.cu data/cuda_cpu.sed $(CONFIG)
	$(EMULATED_SOURCE)
$(M)/moe_emulated.o: WARNINGS := -w# a fault may well be one
$(M)/test_moe: LIBS += -ldl
$(M)/test_moe: $(B)/test_moe.o $(CPU) $(B)/moe_f64.o $(CUDA_OBJECT) $(M)/moe_emulated.o
	$(LINK)
mutate: $(if $(EMULATED),$(M)/test_moe)
	@[ '$(EMULATED)' ] || { echo 'mutate: $(CXX) compiles no C++17 here' \
	    '(or sed knows no -z)' >&2; exit 2; }
	@ONLY='$(ONLY)' bash data/mutate.sh $(M)/test_moe

# By nvcc: one object for all builds, made anew when its sources or the command change. What ptxas
# says of each kernel, and the PTX, stay beside it for `make kernel-report`; the rest that nvcc keeps
# goes.
NVCC_COMPILE = $(CUDA_NVCC) -std=c++17 $(NVCCFLAGS) --threads=0 -Xcompiler -ffp-contract=off \
    $(addprefix -Xcompiler ,$(WARNINGS)) $(if $(filter -Werror,$(WARNINGS)),-Werror all-warnings) \
    $(foreach a,$(CUDA_SMS),-gencode arch=compute_$(a),code=sm_$(a)) \
    -gencode arch=compute_$(lastword $(CUDA_SMS)),code=compute_$(lastword $(CUDA_SMS)) \
    $(if $(CUBLAS_WORKS),-DUSE_CUBLAS) -Xptxas -v --keep --keep-dir $(CUDA_DIR)
ifneq ($(CUDA_OBJECT),)
$(CUDA_DIR)/command: FORCE
	@mkdir -p $(@D); echo '$(NVCC_COMPILE)' | cmp -s - $@ || echo '$(NVCC_COMPILE)' >$@
$(CUDA_OBJECT): moe_kernels.cu $(CUDA_DIR)/command
	$(NVCC_COMPILE) -MMD -MP -MF $(@:.o=.d) -c $< -o $@ >$(@D)/ptxas.log 2>&1 || \
	    { grep -v '^ptxas info' $(@D)/ptxas.log; false; }
	@cd $(@D) && rm -f *.ii *.cudafe* *.gpu *.stub.c *.reg.c *.module_id *.fatbin* *.cubin *.c
endif

ifneq ($(NCCL_OBJECT),)
$(NCCL_OBJECT): comm_nccl.cu $(CUDA_DIR)/command
	$(filter-out -Xptxas -v --keep --keep-dir $(CUDA_DIR),$(NVCC_COMPILE)) $(MPI_CFLAGS) \
	    -MMD -MP -MF $(@:.o=.d) -c $< -o $@
endif

kernel-report:
	@$(MAKE) CUDA=1 kernel-report-run
kernel-report-run: $(CUDA_OBJECT)
	@bash data/kernel_report.sh moe_kernels.cu $(CUDA_DIR)
# On a machine with a GPU: everything that needs one.
gpu-check:
	@bash data/gpu_check.sh
	@$(MAKE) gpu-check-run
gpu-check-run: $(B)/train_moe $(B)/test_moe
	@TRAIN='$(CURDIR)/$(B)/train_moe' TEST='$(CURDIR)/$(B)/test_moe' \
	    bash data/gpu_check.sh '$(strip $(FOUND))'

train_moe $(TESTS): %: FORCE $(B)/%
	@[ "$$(readlink $@)" = $(B)/$@ ] || ln -sfn $(B)/$@ $@

-include $(wildcard $(B)/*.d $(E)/*.d $(M)/*.d $(CUDA_OBJECT:.o=.d) $(NCCL_OBJECT:.o=.d))

# ---- the two commands ----------------------------------------------------------------------------
# Each in two parts: the second make starts when the libraries are there, and probes for them.
# With as many jobs as processors, unless the user's make has its own.
JOBS = $(if $(findstring j,$(filter-out --%,$(MAKEFLAGS))),,-j$(shell nproc 2>/dev/null || echo 1))
train: deps
	@$(MAKE) $(JOBS) train-run
train-run: $(B)/train_moe $(filter train_moe,$(ROOT))
	@TEXT='$(TEXT)' TRAIN=$(if $(ROOT),./,$(B)/)train_moe data/run_train.sh

test: deps
	@$(MAKE) $(JOBS) test-run
# The scripts start makes of their own: they must not inherit the settings of this one.
test-run: programs $(if $(EMULATED),$(E)/train_moe) $(if $(filter cc,$(NAME)),$(ROOT))
	@env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL CC='$(CC)' MAKE='$(MAKE)' SAN='$(SAN)' \
	    TRAIN='$(CURDIR)/$(B)/train_moe' TEST='$(CURDIR)/$(B)/test_moe' \
	    EMULATED='$(if $(EMULATED),$(CURDIR)/$(E)/train_moe)' \
	    bash data/run_tests.sh $(TESTS:%=$(B)/%) $(wildcard data/test_*.sh)

# ---- hostile files -------------------------------------------------------------------------------
# test_fuzz.c once for each target, with libFuzzer and the sanitizers, which need clang; one thread.
# make's own exit status is 2 for a finding too; that of data/run_fuzz.sh is 1.
FUZZ_CC := $(if $(findstring clang,$(CC)),$(CC),clang)
FUZZ    := $(patsubst %,$(B)/fuzz_%,safetensors config tokenizer shard)
fuzz:
	@stop() { echo "fuzz: $$*" >&2; exit 2; }; \
	command -v $(firstword $(FUZZ_CC)) >/dev/null || \
	    stop 'no $(FUZZ_CC) here, which libFuzzer comes with: make deps-all installs it'; \
	tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	echo 'int LLVMFuzzerTestOneInput(const char *p, long n) { return !p && n; }' >"$$tmp/probe.c"; \
	$(FUZZ_CC) -fsanitize=fuzzer,address,undefined "$$tmp/probe.c" -o "$$tmp/probe" \
	    >"$$tmp/log" 2>&1 || { tail -n 1 "$$tmp/log" >&2; \
	    stop '$(FUZZ_CC) has no libFuzzer here (libclang-rt-dev, compiler-rt): make deps-all'; }
	@$(MAKE) CC='$(FUZZ_CC)' SAN=1 fuzz-run
fuzz-run: $(FUZZ)
	@FUZZ_S='$(FUZZ_S)' bash data/run_fuzz.sh $(FUZZ)
$(FUZZ): $(B)/fuzz_%: test_fuzz.c $(CONFIG)
	$(filter-out -fopenmp,$(COMPILE)) -Wno-unknown-pragmas -fsanitize=fuzzer \
	    -DFUZZ_TARGET=fuzz_$* $< -o $@ $(LDFLAGS) $(LIBS)

# ---- packages ------------------------------------------------------------------------------------
# `need DEBIAN FEDORA ARCH HOMEBREW`: the names of one package, "-" where there is none.
MISSING = deb=; rpm=; arch=; brew=; \
	need() { deb="$$deb $$1"; rpm="$$rpm $$2"; arch="$$arch $$3"; brew="$$brew $$4"; }; \
	has() { command -v "$$1" >/dev/null 2>&1; }; \
	has $(firstword $(CC)) && compiler || { \
	    need libc6-dev glibc-devel glibc -; \
	    case '$(CC)' in \
	        *clang*) need clang clang clang llvm; need libomp-dev libomp-devel openmp libomp;; \
	        *) need gcc gcc gcc gcc;; \
	    esac; }; \
	jansson || need libjansson-dev jansson-devel jansson jansson; \
	stb || need libstb-dev stb-devel stb -; \
	needed=$$deb; \
	easy() { has apt-get && [ "$$(id -u)" = 0 ]; }; \
	pcre2 || { easy && need libpcre2-dev pcre2-devel pcre2 pcre2; }; \
	cxx || { easy && need g++ gcc-c++ gcc gcc; }; \
	[ -z '$(if $(filter test,$(MAKECMDGOALS)),$(call on,$(MPI)))' ] || { mpi && has mpirun; } || { \
	    easy && need libopenmpi-dev openmpi-devel openmpi open-mpi && \
	    need openmpi-bin openmpi openmpi open-mpi; }
# PCRE2, a C++ compiler and, for the tests, an MPI are optional, quickly there where packages can be
# installed, and `make test` is then whole: so they come along, but only there, and nothing stops
# when they cannot be had.
# What the optional tests use: a second compiler, an ARM build and a machine to run it, gnuplot.
MISSING_OPTIONAL = \
	try() { printf '$(hash)include <stdio.h>\nint main(void) { return puts("") < 0; }\n' | \
	    "$$@" -x c - -o "$$tmp/probe" >/dev/null 2>&1; }; \
	cxx || need g++ gcc-c++ gcc gcc; \
	pcre2 || need libpcre2-dev pcre2-devel pcre2 pcre2; \
	{ mpi && has mpirun; } || { need libopenmpi-dev openmpi-devel openmpi open-mpi; \
	    need openmpi-bin openmpi openmpi open-mpi; }; \
	has clang || need clang clang clang llvm; \
	has clang-format || need clang-format clang-tools-extra clang llvm; \
	try clang -fopenmp || need libomp-dev libomp-devel openmp libomp; \
	try clang -fsanitize=address,undefined || need libclang-rt-dev compiler-rt compiler-rt -; \
	try aarch64-linux-gnu-gcc -static || { \
	    need gcc-aarch64-linux-gnu gcc-aarch64-linux-gnu aarch64-linux-gnu-gcc -; \
	    need libc6-dev-arm64-cross - aarch64-linux-gnu-glibc -; }; \
	has clang-tidy || need clang-tidy clang-tools-extra clang llvm; \
	has cppcheck || need cppcheck cppcheck cppcheck cppcheck; \
	has gnuplot || need gnuplot-nox gnuplot gnuplot gnuplot; \
	has qemu-aarch64-static || has qemu-aarch64 || \
	    need qemu-user-static qemu-user-static qemu-user-static -

# Prints what is missing; as root on Debian and Ubuntu installs it, elsewhere stops with status 2.
INSTALL = \
	clean() { echo $$1 | tr ' ' '\n' | grep -vx -e - | sort -u | tr '\n' ' '; }; \
	if [ -z "$$deb" ]; then echo "deps: nothing is missing"; exit 0; fi; \
	command="apt-get install -y --no-install-recommends $$(clean "$$deb")"; \
	echo "deps: missing:$$deb"; \
	echo "  Debian, Ubuntu  $$command"; \
	echo "  Fedora          dnf install $$(clean "$$rpm")"; \
	echo "  Arch            pacman -S --needed $$(clean "$$arch")"; \
	echo "  Homebrew        brew install $$(clean "$$brew")"; \
	echo "  stb without a package: put stb_ds.h into DIR/stb, then make CPPFLAGS='-isystem DIR'"; \
	stop() { echo "deps: $$*" >&2; exit 2; }; \
	has apt-get || stop "no apt-get here: install them with one of these, then run make again"; \
	[ "$$(id -u)" = 0 ] || stop "not root; run this as root, then make again: $$command"; \
	export DEBIAN_FRONTEND=noninteractive; \
	apt-cache show $$deb >/dev/null 2>&1 || apt-get update -q || [ -z "$$needed" ] || exit 1; \
	install() { apt-get -o DPkg::Lock::Timeout=120 $${command$(hash)apt-get}; }; \
	install || { apt-get update -q && install; } || { [ -z "$$needed" ] || exit 1; \
	    echo "deps: what is missing is optional: going on without it"; exit 0; }; \
	rm -f build/*/config.mk

deps:
	@$(PROBES); $(MISSING); $(INSTALL)
deps-all:
	@$(PROBES); $(MISSING); $(MISSING_OPTIONAL); needed=$$deb; $(INSTALL)

# ---- pictures ------------------------------------------------------------------------------------
# `make plot RUN=out/tiny-1`: the run's losses and experts, beside its log.
RUN ?=
plot: all
	@[ -n '$(RUN)' ] || { echo 'plot: expected RUN=FOLDER, the folder of a run' >&2; exit 2; }
	@command -v gnuplot >/dev/null || { \
	    echo 'plot: no gnuplot here: apt-get install gnuplot-nox, or make deps-all' >&2; exit 2; }
	@[ -d '$(RUN)' ] || { echo 'plot: $(RUN) is no folder of a run' >&2; exit 2; }
	@./train_moe info '$(RUN)' --tsv >'$(RUN)/run.tsv.part' || { rm -f '$(RUN)/run.tsv.part'; exit 2; }
	@mv '$(RUN)/run.tsv.part' '$(RUN)/run.tsv'
	@gnuplot -c data/plot.gp '$(RUN)/run.tsv' '$(RUN)/run' && ls '$(RUN)'/run-*

# ---- the rest ------------------------------------------------------------------------------------
# cppcheck: all it has against wrong, slow or unportable code, but for
#   invalidPointerCast   scratch memory is bytes, cut into aligned pieces of any type
#   invalidFunctionArg   a logarithm of a sum that it takes for 0
#   arrayIndexThenCheck  j < e, where neither is a limit
#   objectIndex          a vector is read through a pointer to it, lane by lane (gemm.h)
# clang-tidy: the checks of .clang-tidy, which has a reason for each that is left out. clang-format:
# as `make format` leaves it.
SOURCES := $(wildcard *.c data/*.c)
lint:
	cppcheck --quiet --std=c11 --enable=warning,performance,portability --inline-suppr \
	    --max-configs=48 \
	    $(addprefix --suppress=,invalidPointerCast invalidFunctionArg arrayIndexThenCheck objectIndex) \
	    --error-exitcode=1 $(SOURCES)
	clang-tidy --quiet $(SOURCES) -- $(NUMERICS) -DUSE_PCRE2 $(CPPFLAGS)
	clang-format --dry-run -Werror $(wildcard *.c *.h *.cu)
format:
	clang-format -i $(wildcard *.c *.h *.cu)
clean:
	rm -rf build train_moe train_moe_emulated $(TESTS)
help:
	@echo 'make              build train_moe and its tests'
	@echo 'make train        get what is missing, build, train a small model on real text (TEXT=PATH)'
	@echo 'make test         get what is missing, build, run every test'
	@echo 'make emulated     train_moe_emulated, which runs the CUDA kernels on the CPU'
	@echo 'make gpu-check    the kernels on a GPU: against the reference, in training, and how fast'
	@echo 'make kernel-report  registers, spills, shared memory and occupancy of every kernel (nvcc)'
	@echo 'make mutate       faults put into the kernels, one at a time: the share that tests find'
	@echo 'make deps         install the libraries needed (apt; elsewhere prints their names)'
	@echo 'make deps-all     and what is optional: C++, clang, an ARM compiler and emulator, gnuplot'
	@echo 'make plot         pictures of a run (RUN=out/tiny-1), with gnuplot'
	@echo 'make fuzz         hostile files for every reader, FUZZ_S=60 seconds each (clang)'
	@echo 'make lint         cppcheck, clang-tidy and clang-format, which must find nothing'
	@echo 'make format       clang-format on every source'
	@echo 'make clean        remove what was built (never out/ or data/text/)'
	@echo 'settings: CC=clang  CFLAGS=-O2  SAN=1 (sanitizers)  PORTABLE=1 (no -march=native)'
	@echo '          OPENMP=0  PCRE2=0  MPI=0  CUDA=1 or 0  CUBLAS=0  NCCL=0  CUDA_ARCH="80 90"  NVCC=/path/nvcc'
	@echo '          CXX=clang++'
