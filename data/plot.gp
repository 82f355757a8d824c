# Pictures of a run: losses, expert load by layer over time, experts by kind of text.
#
#     train_moe info out/tiny-1 --tsv >run.tsv
#     gnuplot -c data/plot.gp run.tsv run        makes run-loss, run-load, run-text .png and .svg
#
# `make plot RUN=out/tiny-1` does both. A load is in even shares: 1 = as many tokens as the mean
# expert. Tables that the file lacks (a dense model has one alone) make no picture.
tsv = ARG1
out = ARG2 eq "" ? "run" : ARG2
set datafile separator "\t"
set datafile missing "-"
set style line 1 lw 2
set key top right

# How many data rows a table has; 0 where there is none.
rows(table) = int(system(sprintf("awk -v t='# %s' '$0 == t { on = 1; n = -1; next } NF == 0 { on = 0 } on { n++ } END { print n + 0 }' '%s'", table, tsv)))
layers(n) = system(sprintf("awk -F '\\t' '$0 == \"# load\" { on = 1; next } NF == 0 { on = 0 } on && $2 ~ /^[0-9]+$/ && !seen[$2]++ { printf \"%%s \", $2 }' '%s'", tsv))
columns(table) = int(system(sprintf("awk -F '\\t' -v t='# %s' 'on { print NF; exit } $0 == t { on = 1 }' '%s'", table, tsv)))

do for [kind in "png svg"] {
    if (kind eq "png") { set terminal pngcairo size 1200,800 font ",11" } \
    else { set terminal svg size 1200,800 font ",14" background "white" }

    if (rows("loss") > 0) {
        set output out."-loss.".kind
        set title "Loss"
        set xlabel "step"
        set ylabel "cross entropy"
        set grid
        plot tsv index "loss" using 1:3 with lines lw 1 title "training", \
             tsv index "loss" using 1:4 with linespoints lw 2 pt 7 title "validation"
        unset grid
        set output
    }
    if (rows("load") > 0) {
        set output out."-load.".kind
        names = layers(0)
        many = words(names)
        experts = columns("load") - 2
        set multiplot layout (many + 1) / 2, many > 1 ? 2 : 1 title "Expert load over time, in even shares"
        set xlabel "step"
        set ylabel "expert"
        set cblabel ""
        set palette defined (0 "#204a87", 1 "#f5f5f0", 2 "#a40000")
        set cbrange [0:2]
        set yrange [-0.5:experts - 0.5]
        set view map
        do for [l in names] {
            set title "layer ".l
            plot for [e = 0:experts - 1] tsv index "load" \
                using (column(2) == l + 0 ? column(1) : NaN):(e):(column(e + 3)) \
                with points pt 5 ps 1 lc palette notitle
        }
        unset multiplot
        set autoscale
        set output
    }
    if (rows("text") > 0) {
        set output out."-text.".kind
        texts = columns("text") - 2
        set title "Which experts a text goes to, in even shares"
        set xlabel "expert, layer by layer"
        set ylabel "load"
        set style data histograms
        set style fill solid 0.8
        set grid y
        set yrange [0:*]
        set xtics rotate by -90 font ",8"
        plot for [t = 1:texts] tsv index "text" \
            using (column(t + 2)):xtic(sprintf("%d.%d", column(1), column(2))) \
            title system(sprintf("awk -F '\\t' 'on { print $%d; exit } $0 == \"# text\" { on = 1 }' '%s'", t + 2, tsv)) noenhanced
        unset grid
        set style data points
        set xtics norotate autofreq
        set autoscale
        set output
    }
}
