#!/usr/bin/env bash
# What `make mutate` does takes minutes; here is what can be seen at once: that data/mutants.tsv
# still fits moe_kernels.cu, and that data/mutate.sh refuses a table that does not, and tells what
# is caught from what survives.
. "$(dirname "$0")/testing.sh"

fits() {
    run 0 bash "$root/data/mutate.sh" --check
    said '^[0-9]+ mutants at [0-9]+ places$' stdout
    [ "$(sed 's/ .*//' stdout)" -ge 60 ] || no "$(<stdout): expected at least 60"
}
check mutants/fit fits

# A tree with a source and a table of its own, and a test_moe in two lines of shell.
small() {
    mkdir data
    cp "$root/data/mutate.sh" data
    printf 'x = a + b; // both\nif (x) y();\nif (x) z();\n' >moe_kernels.cu
}
row() { printf '%s\t%s\t%s\t%s\t%s' "$@" && echo; }

switches() {
    small
    {
        row g/minus add fp32 'a + b' 'a - b'
        row g/none add fp32 '@y();@\nif' ''
        row g/twice add fp32 '@y();@\nif' 'y(), y();'
        row g/comment add fp32 'x = a@ + b; // both\n@if' ' - b;'
    } >data/mutants.tsv
    run 1 bash data/mutate.sh --switch # the first and the last overlap
    said overlap
    sed -i '/comment/d' data/mutants.tsv
    run 0 bash data/mutate.sh --switch
    cat >expected <<'END'
x = (mutant == 1 ? (a - b) : (a + b)); // both
if (x) { if (mutant == 2) {  } else if (mutant == 3) { y(), y(); } else { y(); } }
if (x) z();
END
    sed '1s/^static const int mutant = [^;]*; //' stdout | cmp -s - expected || no "$(<stdout)"
}
check mutants/switch switches

bad_rows() {
    local line
    small
    while IFS='|' read -r line pattern; do
        printf '%b\n' "$line" >data/mutants.tsv
        run 1 bash data/mutate.sh --check
        said "$pattern"
        [ ! -s stdout ] || no "found: $(<stdout)"
    done <<'END'
g/m\tadd\tfp32\ta + c\ta - c|g/m: its old text is not in the source
g/m\tadd\tfp32\tif (x)\tif (y)|g/m: its old text is in the source more than once
g/m\tadd\tfp32\ta + b\ta + b|g/m: its new text is the old one
g/m\tadd\tfp32\ta + b\t|g/m: an expression needs a new text
g/m\tadd\tfp32\ta @+ b\ta - b|expected two @ or none
g/m\tadd\tfp16\ta + b\ta - b|expected types, found "fp16"
g/m\t\tfp32\ta + b\ta - b|expected operations, found ""
m\tadd\tfp32\ta + b\ta - b|expected a name GROUP/WHAT, found m
g/m\tadd\tfp32\ta + b|4 columns
g/m\tadd\tfp32\ta + b\tb\ng/m\tadd\tfp32\tz();\t|g/m is there twice
# nothing|has no rows
END
}
check mutants/bad_rows bad_rows

# The program sees mutants 1, 2 and 4, each in another way; 3 it does not, and 5 only with seed 3.
runs() {
    local name
    small
    for name in wrong fault same crash seldom; do
        row g/$name add fp32 'a + b' "a - b + $name"
    done >data/mutants.tsv
    cat >tests <<'END'
#!/usr/bin/env bash
case $MUTANT in
    1) echo 'add plain - out 1e0 1e0 @3 1e-5 0.1  FAIL: not a number'; exit 1 ;;
    2) echo 'emulated device: k, block (0,0,0): misaligned' >&2; exit 1 ;;
    4) kill -SEGV $$ ;;
    5)
        case " $* " in *' --seed 3 '*) ;; *) exit 0 ;; esac
        echo 'add T1 - out 1 1 @3 1 0  FAIL: other bits'
        exit 1 ;;
esac
END
    chmod +x tests
    run 1 bash data/mutate.sh ./tests
    said '^caught +g/wrong +add, fp32: plain, -, out: not a number$' stdout
    said '^caught +g/fault +add, fp32: k, block .*: misaligned$' stdout
    said '^SURVIVED +g/same +no reason is known' stdout
    said '^caught +g/crash +add, fp32: killed by signal 11$' stdout
    said '^caught +g/seldom +add, fp32: T1, -, out: other bits$' stdout
    said '^g +4 of +5 caught$' stdout
    said '^5 mutants, 4 caught \(80%\), 1 unexplained' stdout
    ONLY=g/crash run 0 bash data/mutate.sh ./tests
    said '^1 mutants, 1 caught \(100%\), 0 unexplained' stdout
    ONLY=h run 2 bash data/mutate.sh ./tests
    said "ONLY=h: expected a name or a group"
    sed -i '/same/s/$/\tequivalent: it is the same/' data/mutants.tsv
    run 1 bash data/mutate.sh ./tests
    said '^SURVIVED +g/same +equivalent: it is the same$' stdout
    said '^5 mutants, 4 caught \(80%\), 0 unexplained' stdout
    echo 'exit 1' >tests
    run 1 bash data/mutate.sh ./tests
    said '^mutate: the unchanged code fails: add, fp32'
}
check mutants/run runs
