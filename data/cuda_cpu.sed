# What C++ cannot say of a CUDA source, rewritten for cuda_cpu.h. For sed -z -E: the file is one line,
# and no newline is taken away or added, so that the compiler's line numbers stay right.
#
#   kernel<T><<<grid, block, shared, stream>>>(a, b)
#     -> cuda_cpu::launch(grid, block, shared, stream).run("kernel<T>", kernel<T>, a, b)
#   extern __shared__ T name[];   -> T *name = (T *)cuda_cpu::dynamic_shared();
#   __shared__ T name[3][4];      -> T (&name)[3][4] = *(T (*)[3][4])cuda_cpu::static_shared(...)
#   __shared__ T name;            -> T &name = *(T *)cuda_cpu::static_shared(...)
#
# A launch has at least one argument; its template arguments hold no < or >, its configuration none
# but that of ->.
s/([A-Za-z_][A-Za-z_0-9]*(<[^<>;"]*>)?)<<<(([^<>;]|->)*)>>>\(/cuda_cpu::launch(\3).run("\1", \1, /g
s/extern __shared__ (__align__\([0-9]+\) )?([A-Za-z_0-9: ]+) ([A-Za-z_0-9]+)\[\];/\2 *\3 = (\2 *)cuda_cpu::dynamic_shared();/g
s/__shared__ (__align__\([0-9]+\) )?([A-Za-z_0-9: ]+) ([A-Za-z_0-9]+)((\[[^];]*\])+);/\2 (\&\3)\4 = *(\2 (*)\4)cuda_cpu::static_shared(__COUNTER__, sizeof(\2 \4));/g
s/__shared__ (__align__\([0-9]+\) )?([A-Za-z_0-9: ]+) ([A-Za-z_0-9]+);/\2 \&\3 = *(\2 *)cuda_cpu::static_shared(__COUNTER__, sizeof(\2));/g
