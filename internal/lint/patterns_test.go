package lint

import (
	"fmt"
	"io/fs"
	"regexp"
	"strings"
	"testing"
)

// halfInsensitive matches flags for a whole pattern before alternatives. The go command compiles each alternative of -run
// and -skip alone, so that the flags hold for the first only: (?i:a|b) is meant.
var halfInsensitive = regexp.MustCompile(`\(\?[a-zA-Z]+\)[^'"\s]*\|`)

// checkTestPatterns looks at what selects tests in the files that run them.
func checkTestPatterns(t *testing.T, tree fs.FS) (complaints []string) {
	names := append(files(t, tree, "Makefile"), files(t, tree, ".sh")...)
	for _, name := range append(names, files(t, tree, ".md")...) {
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(text), "\n") {
			if !strings.HasPrefix(line, ledgerRow) && halfInsensitive.MatchString(line) {
				complaints = append(complaints, fmt.Sprintf("%s:%d: the flags hold for the first alternative only: write (?i:a|b)", name, i+1))
			}
		}
	}
	return complaints
}

// wallNanoseconds of the wall clock are no measure of durations: it is set back and forward. internal/clock has the times of commits,
// client/tls.go compares times of files, and bench sends times from one process to another.
var wallNanoseconds = regexp.MustCompile(`\.Unix(Nano)?\(\) ?-|\.UnixNano\(\)|time\.Unix\(0,`)

// checkDurations looks at what measures durations.
func checkDurations(t *testing.T, tree fs.FS) (complaints []string) {
	for _, name := range files(t, tree, ".go") {
		if strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "internal/clock/") || name == "client/tls.go" || strings.HasPrefix(name, "bench/") {
			continue
		}
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(text), "\n") {
			if wallNanoseconds.MatchString(line) {
				complaints = append(complaints, fmt.Sprintf("%s:%d: a duration of the wall clock: keep a time.Time, which has the monotonic clock", name, i+1))
			}
		}
	}
	return complaints
}

func TestDurationsAreOfTheMonotonicClock(t *testing.T) {
	report(t, checkDurations(t, repository()))
	wantOne(t, checkDurations(t, tree("internal/a.go", "package a\nvar began = time.Now().UnixNano()\n")), "internal/a.go:2")
}

// ledgerRow begins a row of the bug ledger, which may name a pattern as it was.
const ledgerRow = "| 20"

func TestPatternsOfTestsAreWholeInEachAlternative(t *testing.T) {
	report(t, checkTestPatterns(t, repository()))
	wantOne(t, checkTestPatterns(t, tree("Makefile", "TESTS := '(?i)crash|kill'\nALL := '(?i:crash|kill)'\nONE := '(?i)crash' | tee\n")), "Makefile:1")
}
