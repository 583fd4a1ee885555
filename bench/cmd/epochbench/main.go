// Command epochbench runs the benchmark scenarios and writes what they measured: JSON, a Markdown table, one
// self-contained HTML page with charts, and text for benchstat.
//
//	epochbench                       everything, into results/runs/
//	epochbench -run 'put-sync|get'   the scenarios whose names match
//	epochbench -run '^(peers|watch)-'   EpochKV, etcd and Redis over the wire, a process each
//	epochbench -keys table           all with keys that have a common prefix, as those of real data
//	epochbench -smoke                each for a moment: do they run and verify?
//	epochbench -large                those that are scaled down otherwise, at the size that their figures ask for (an hour)
//	epochbench -render results/runs/x.json   the tables and the page again from a saved run
//	epochbench -record results results/runs/*.json   the two files that the repository keeps, from saved runs
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/epochkv/epochkv/bench/cache"
	"github.com/epochkv/epochkv/bench/growth"
	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/memtable"
	"github.com/epochkv/epochkv/bench/origin"
	"github.com/epochkv/epochkv/bench/peers"
	"github.com/epochkv/epochkv/bench/scenarios"
	"github.com/epochkv/epochkv/bench/tree"
	"github.com/epochkv/epochkv/bench/txn"
	"github.com/epochkv/epochkv/bench/wire"
	"github.com/epochkv/epochkv/bench/workload"
)

type flags struct {
	run, skip          string
	out, scratch       string
	render, record     string
	budget             time.Duration
	scale              float64
	seed               uint64
	smoke, list, large bool
	verbose, isolated  bool
	keys               string
}

func main() {
	var f flags
	flag.StringVar(&f.run, "run", ".", "run the scenarios whose names match this regular expression")
	flag.StringVar(&f.skip, "skip", "^$", "but not those whose names match this one")
	flag.StringVar(&f.out, "out", "results/runs", "directory for the results")
	flag.StringVar(&f.scratch, "scratch", "results/tmp", "directory for the data, on the device to be measured")
	flag.StringVar(&f.render, "render", "", "render the report from this saved JSON and run nothing")
	flag.StringVar(&f.record, "record", "", "write figures and benchstat text of the saved runs that are the arguments to this directory, and run nothing")
	flag.DurationVar(&f.budget, "budget", 20*time.Minute, "time for all scenarios together")
	flag.Uint64Var(&f.seed, "seed", 1, "seed of keys and values")
	flag.Float64Var(&f.scale, "scale", 1, "times the usual sizes")
	flag.BoolVar(&f.smoke, "smoke", false, "one small round of each scenario; nothing is judged")
	flag.BoolVar(&f.large, "large", false, "only the scenarios that are scaled down otherwise, at full size and without regard to the budget")
	flag.BoolVar(&f.verbose, "v", false, "print a line for every run")
	flag.BoolVar(&f.isolated, "isolated", false, "for epochbench itself: run one arm once, as standard input says")
	flag.StringVar(&f.keys, "keys", keysRandom, "shape of the keys: random bytes, or table for table/00000000042/column; scenarios are then called NAME-table")
	flag.BoolVar(&f.list, "list", false, "list the scenarios and run nothing")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := f.main(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "epochbench:", err)
		stop()
		os.Exit(1)
	}
}

// The shapes of keys.
const (
	keysRandom = "random"
	keysTable  = "table"
)

func (f *flags) main(ctx context.Context) error {
	switch f.keys {
	case keysRandom:
	case keysTable:
		workload.UseTableKeys()
	default:
		return fmt.Errorf("unknown keys %q; expected %s or %s", f.keys, keysRandom, keysTable)
	}
	if f.render != "" {
		report, err := harness.Load(f.render)
		if err != nil {
			return err
		}
		return write(report, strings.TrimSuffix(f.render, ".json"))
	}
	if f.record != "" {
		return record(f.record, flag.Args())
	}
	if f.isolated {
		return harness.RunIsolated(ctx, named(everything()), os.Stdin, os.Stdout)
	}
	chosen, err := f.choose()
	if err != nil {
		return err
	}
	if f.list {
		for _, s := range chosen {
			fmt.Printf("%-20s %s\n", s.Name, s.About)
		}
		return nil
	}
	return f.measure(ctx, chosen)
}

// everything is every scenario, in the order in which they run.
func everything() []harness.Scenario {
	return slices.Concat(
		scenarios.All(), memtable.Scenarios(), tree.Scenarios(), origin.Scenarios(), cache.Scenarios(), txn.Scenarios(), growth.Scenarios(),
		wire.Scenarios(), peers.Scenarios(),
	)
}

// named tells the results with table keys from those with random ones.
func named(all []harness.Scenario) []harness.Scenario {
	if workload.TableKeys() {
		for i := range all {
			all[i].Name += "-table"
			all[i].About += " Keys are as table/00000000042/column."
		}
	}
	return all
}

func (f *flags) choose() (chosen []harness.Scenario, err error) {
	pattern, err := regexp.Compile(f.run)
	if err != nil {
		return nil, err
	}
	skipped, err := regexp.Compile(f.skip)
	if err != nil {
		return nil, err
	}
	all := named(everything())
	if err := harness.Validate(all); err != nil {
		return nil, err
	}
	for _, s := range all {
		if pattern.MatchString(s.Name) && !skipped.MatchString(s.Name) && (!f.large || !reflect.DeepEqual(s.Large, harness.Sizes{})) {
			s.Size = max(int(float64(s.Size)*f.scale), 1)
			chosen = append(chosen, s)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("no scenario matches %q; -list shows them", f.run)
	}
	return chosen, nil
}

func (f *flags) measure(ctx context.Context, chosen []harness.Scenario) error {
	if err := errors.Join(os.MkdirAll(f.scratch, 0o755), os.MkdirAll(f.out, 0o755)); err != nil {
		return err
	}
	report := &harness.Report{
		Began: time.Now().UTC(), Machine: harness.Describe(slices.Concat(scenarios.Peers, peers.Modules)...), Command: "epochbench " + strings.Join(os.Args[1:], " "),
		Seed: f.seed, Smoke: f.smoke,
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	outcomes, err := harness.Execute(ctx, chosen, harness.Options{
		Scratch: f.scratch, Budget: f.budget, Smoke: f.smoke, Large: f.large, Seed: f.seed, Isolate: []string{self, "-isolated", "-keys", f.keys}, Verbose: f.verbose,
		Log: func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) },
	})
	// What was measured is kept, even if a scenario failed or the rest was interrupted.
	report.Outcomes = outcomes
	if slices.ContainsFunc(chosen, func(s harness.Scenario) bool { return peers.Compares(s.Name) }) {
		maps.Copy(report.Machine.Versions, peers.Versions(f.scratch))
	}
	name := filepath.Join(f.out, report.Began.Format("20060102-150405-")+report.Machine.Commit)
	return errors.Join(err, report.Save(name+".json"), write(report, name), report.WriteMarkdown(os.Stdout))
}

// renderings are the ways to write something, each with the name of its file.
type renderings map[string]func(io.Writer) error

// write renders the report beside its JSON.
func write(report *harness.Report, name string) error {
	return renderings{
		name + ".md": report.WriteMarkdown, name + ".html": report.WriteHTML, name + ".txt": report.WriteBenchstat,
	}.write()
}

// record writes what the repository keeps of saved runs.
func record(dir string, names []string) error {
	var runs []*harness.Report
	for _, name := range names {
		run, err := harness.Load(name)
		if err != nil {
			return err
		}
		runs = append(runs, run)
	}
	kept, err := harness.NewRecord(runs...)
	if err != nil {
		return err
	}
	return renderings{
		filepath.Join(dir, "README.md"): kept.WriteMarkdown, filepath.Join(dir, "benchstat.txt"): kept.WriteBenchstat,
	}.write()
}

func (r renderings) write() error {
	for name, render := range r {
		file, err := os.Create(name)
		if err != nil {
			return err
		}
		if err := errors.Join(render(file), file.Close()); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}
