# Builds train_moe (the trainer and its other commands) and its tests: test_moe (what it computes),
# test_golden (the same beside transformers), test_files (what it reads and writes), test_tokens
# (text to tokens), test_fuzz (hostile files), test_comm (ranks). `make help` lists the targets.
#
# Objects and programs live in build/NAME, one folder for each compiler and set of flags, so that
# builds never mix: build/cc, build/clang, build/cc-san, build/cc-portable. The programs are linked
# from there to the root. What the compiler can do, and which libraries there are, is found once by
# compiling and linking small probes, and kept in build/NAME/config.mk; `make clean` forgets it.

# ---- settings, on the command line: `make CC=clang SAN=1 test` -----------------------------------
CC       ?= cc
CFLAGS   ?= -O3 -g# optimisation only: what the numbers need is in NUMERICS below
CPPFLAGS ?=# -isystem DIR, for headers in unusual places
LDFLAGS  ?=# -L DIR
WARNINGS ?= -Wall -Wextra -Werror
PORTABLE ?=# 1: no -march=native; on x86-64 one program, which picks AVX2 or AVX-512 at start
SAN      ?=# 1: address and undefined-behaviour sanitizers
OPENMP   ?= 1# 0: build without, even where it is there
PCRE2    ?= 1# the same
MPI      ?= 1# the same: ranks; found through mpicc, whose flags go to CC
TEXT     ?=# a text file or folder for `make train`, instead of the fetched texts
FUZZ_S   ?= 60# seconds of `make fuzz` for each target

# The same bits from gcc and clang, at any optimisation level: no contraction of a*b+c (gemm.h asks
# for fused multiply-adds where it wants them), nothing from the -ffast-math family.
# -fno-math-errno only lets sqrt and fma, which are correctly rounded either way, become
# instructions; exp, log, sin and cos are our own.
NUMERICS := -std=gnu11 -ffp-contract=off -fno-math-errno

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
CUSTOM := $(strip $(filter-out -O3 -g,$(CFLAGS)) $(CPPFLAGS) $(LDFLAGS))
NAME   := $(subst /,_,$(subst $(space),_,$(strip $(CC))))
NAME   := $(NAME)$(if $(call on,$(SAN)),-san)$(if $(call on,$(PORTABLE)),-portable)
NAME   := $(NAME)$(if $(call off,$(OPENMP)),-no-openmp)$(if $(call off,$(PCRE2)),-no-pcre2)
NAME   := $(NAME)$(if $(call off,$(MPI)),-no-mpi)
NAME   := $(NAME)$(if $(CUSTOM),-$(firstword $(shell printf '%s' '$(CUSTOM)' | cksum)))
B      := build/$(NAME)
CONFIG := $(B)/config.mk

ifneq ($(call on,$(SAN)),)
MODE := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
endif

.PHONY: all programs plot lint fuzz fuzz-run train train-run test test-run deps deps-all format \
    clean help FORCE
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
	    links omp.h 'return omp_get_max_threads() < 1;' -fopenmp; }

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
	mpi_c=; mpi_l=; mpi && mpi_c=$$(echo $$(mpi_cflags)) && mpi_l=$$(echo $$(mpi_libs)); \
	{ echo "TARGET := $$($(CC) -dumpmachine)"; \
	  echo "ARCH := $$arch"; \
	  echo "OMP := $${omp:--Wno-unknown-pragmas}"; \
	  echo "PCRE2_LIB := $$pcre"; \
	  echo "MPI_CFLAGS := $$mpi_c"; \
	  echo "MPI_LIBS := $$mpi_l"; \
	  echo "FOUND := OpenMP $$([ "$$omp" ] && echo on || echo 'off (one thread)')\$$(comma)"; \
	  echo "FOUND += MPI $$([ "$$mpi_l" ] && echo on || echo 'off (one rank)')\$$(comma)"; \
	  echo "FOUND += PCRE2 $$([ "$$pcre" ] && echo on || echo 'off (no vocabularies with merges)')"; \
	} >$@.part && mv $@.part $@

# Goals that work on a machine where the probes would fail.
UNCONFIGURED := train test fuzz deps deps-all lint format clean help
ifneq ($(filter-out $(UNCONFIGURED),$(or $(MAKECMDGOALS),all)),)
include $(CONFIG)
endif

# ---- the programs --------------------------------------------------------------------------------
DEFINES = $(if $(PCRE2_LIB),-DUSE_PCRE2) $(if $(MPI_LIBS),-DUSE_MPI $(MPI_CFLAGS))
COMPILE = $(CC) $(NUMERICS) $(CFLAGS) $(ARCH) $(OMP) $(WARNINGS) $(DEFINES) $(CPPFLAGS) $(MODE) -MMD -MP
LIBS    = $(PCRE2_LIB) -ljansson -lm
LINK    = $(CC) $(CFLAGS) $(ARCH) $(OMP) $(MODE) -o $@ $(filter %.o,$^) $(LDFLAGS) $(LIBS)

# moe_cpu.c is the CPU backend; in a portable x86-64 build it is there three times, once for each
# instruction set.
CPU := $(B)/moe_cpu.o
ifneq ($(call on,$(PORTABLE)),)
ifneq ($(filter x86_64-% amd64-%,$(TARGET)),)
CPU := $(B)/moe_base.o $(B)/moe_avx2.o $(B)/moe_avx512.o
DISPATCH := -DMOE_DISPATCH
endif
endif

TESTS    := test_moe test_golden test_files test_tokens test_fuzz test_comm
PROGRAMS := $(B)/train_moe $(TESTS:%=$(B)/%)
# The root's programs are links to the last build that `make` made; a sanitizer build never takes
# their place, nor does `make test` with settings of its own.
ROOT := $(if $(call on,$(SAN)),,train_moe $(TESTS))

# `make programs` builds without touching the root: for scripts that build a second time.
all: programs $(ROOT)
programs: $(PROGRAMS)
	@echo "$(B): $(strip $(CC) $(ARCH) $(MODE)), $(FOUND)"

$(B)/train_moe: $(B)/train_moe.o $(CPU)
	$(LINK)
# The tests measure against moe_f64.o, the same backend in double precision.
$(B)/test_moe: $(B)/test_moe.o $(CPU) $(B)/moe_f64.o
	$(LINK)
$(B)/test_golden: $(B)/test_golden.o $(CPU)
	$(LINK)
$(B)/test_files: $(B)/test_files.o
	$(LINK)
$(B)/test_tokens: $(B)/test_tokens.o
	$(LINK)
$(B)/test_fuzz: $(B)/test_fuzz.o
	$(LINK)
$(B)/test_comm: LIBS += $(MPI_LIBS)
$(B)/test_comm: $(B)/test_comm.o
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

train_moe $(TESTS): %: FORCE $(B)/%
	@[ "$$(readlink $@)" = $(B)/$@ ] || ln -sfn $(B)/$@ $@

-include $(wildcard $(B)/*.d)

# ---- the two commands ----------------------------------------------------------------------------
# Each in two parts: the second make starts when the libraries are there, and probes for them.
train: deps
	@$(MAKE) train-run
train-run: all
	@TEXT='$(TEXT)' TRAIN=$(if $(ROOT),./,$(B)/)train_moe data/run_train.sh

test: deps
	@$(MAKE) test-run
# The scripts start makes of their own: they must not inherit the settings of this one.
test-run: programs $(if $(filter cc,$(NAME)),$(ROOT))
	@env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL CC='$(CC)' MAKE='$(MAKE)' SAN='$(SAN)' \
	    TRAIN='$(CURDIR)/$(B)/train_moe' TEST='$(CURDIR)/$(B)/test_moe' \
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
	pcre2 || { has apt-get && [ "$$(id -u)" = 0 ] && need libpcre2-dev pcre2-devel pcre2 pcre2; }; \
	[ -z '$(call on,$(MPI))' ] || { mpi && has mpirun; } || { \
	    has apt-get && [ "$$(id -u)" = 0 ] && \
	    need libopenmpi-dev openmpi-devel openmpi open-mpi && need openmpi-bin openmpi openmpi open-mpi; }
# PCRE2 and MPI are optional, quickly there where packages can be installed, and `make test` is then
# whole: so they come along, but only there, and nothing stops when they cannot be had.
# What the optional tests use: a second compiler, an ARM build and a machine to run it, gnuplot.
MISSING_OPTIONAL = \
	try() { printf '$(hash)include <stdio.h>\nint main(void) { return puts("") < 0; }\n' | \
	    "$$@" -x c - -o "$$tmp/probe" >/dev/null 2>&1; }; \
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
	    $(addprefix --suppress=,invalidPointerCast invalidFunctionArg arrayIndexThenCheck objectIndex) \
	    --error-exitcode=1 $(SOURCES)
	clang-tidy --quiet $(SOURCES) -- $(NUMERICS) -DUSE_PCRE2 $(CPPFLAGS)
	clang-format --dry-run -Werror $(wildcard *.c *.h)
format:
	clang-format -i $(wildcard *.c *.h)
clean:
	rm -rf build train_moe $(TESTS)
help:
	@echo 'make              build train_moe and its tests'
	@echo 'make train        get what is missing, build, train a small model on real text (TEXT=PATH)'
	@echo 'make test         get what is missing, build, run every test'
	@echo 'make deps         install the libraries needed (apt; elsewhere prints their names)'
	@echo 'make deps-all     and what is optional: clang, an ARM compiler and emulator, gnuplot'
	@echo 'make plot         pictures of a run (RUN=out/tiny-1), with gnuplot'
	@echo 'make fuzz         hostile files for every reader, FUZZ_S=60 seconds each (clang)'
	@echo 'make lint         cppcheck, clang-tidy and clang-format, which must find nothing'
	@echo 'make format       clang-format on every source'
	@echo 'make clean        remove what was built (never out/ or data/text/)'
	@echo 'settings: CC=clang  CFLAGS=-O2  SAN=1 (sanitizers)  PORTABLE=1 (no -march=native)  OPENMP=0  PCRE2=0  MPI=0'
