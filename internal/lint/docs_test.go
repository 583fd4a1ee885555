package lint

import (
	"fmt"
	"go/ast"
	"go/token"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

var (
	// ourCommand matches a line of a document that shows one of our commands, in a code block or in back quotes.
	ourCommand = regexp.MustCompile(`\b(kvserver|kvctl|epochbench)\b`)
	longFlag   = regexp.MustCompile(`(?:^|[\s\x60(])--([a-z][a-z0-9-]+)`)
	makeTarget = regexp.MustCompile("(?:^|`|\\$ )make ([a-z][a-z0-9-]+)")
	target     = regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):`)
	link       = regexp.MustCompile(`\]\(([^)#\s]+)(?:#[^)]*)?\)`)
)

// documents are the Markdown files that users read.
func documents(t *testing.T, tree fs.FS) map[string]string {
	t.Helper()
	texts := map[string]string{}
	for _, name := range files(t, tree, ".md") {
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			t.Fatal(err)
		}
		texts[name] = string(text)
	}
	return texts
}

// literals is the set of string literals in the packages that define flags.
func literals(t *testing.T, tree fs.FS) map[string]bool {
	t.Helper()
	set := map[string]bool{"help": true, "version": true}
	for _, s := range sources(t, tree) {
		if s.isTest() || !below(s.dir(), []string{"cmd", "internal/config", "bench/cmd", "examples"}) {
			continue
		}
		ast.Inspect(s.syntax, func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if text, err := strconv.Unquote(lit.Value); err == nil {
					set[text] = true
				}
			}
			return true
		})
	}
	return set
}

func checkFlags(t *testing.T, tree fs.FS) (complaints []string) {
	known := literals(t, tree)
	for name, text := range documents(t, tree) {
		for number, line := range strings.Split(text, "\n") {
			if !ourCommand.MatchString(line) {
				continue
			}
			for _, match := range longFlag.FindAllStringSubmatch(line, -1) {
				if !known[match[1]] {
					complaints = append(complaints, fmt.Sprintf("%s:%d: no command has a flag --%s", name, number+1, match[1]))
				}
			}
		}
	}
	return complaints
}

func checkTargets(t *testing.T, tree fs.FS) (complaints []string) {
	makefile, err := fs.ReadFile(tree, "Makefile")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, match := range target.FindAllStringSubmatch(string(makefile), -1) {
		known[match[1]] = true
	}
	for name, text := range documents(t, tree) {
		for _, match := range makeTarget.FindAllStringSubmatch(text, -1) {
			if !known[match[1]] {
				complaints = append(complaints, fmt.Sprintf("%s: the Makefile has no target %s", name, match[1]))
			}
		}
	}
	return complaints
}

func checkLinks(t *testing.T, tree fs.FS) (complaints []string) {
	for name, text := range documents(t, tree) {
		for _, match := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(match[1], "://") || strings.HasPrefix(match[1], "mailto:") {
				continue
			}
			if _, err := fs.Stat(tree, path.Join(path.Dir(name), match[1])); err != nil {
				complaints = append(complaints, fmt.Sprintf("%s: dead link to %s", name, match[1]))
			}
		}
	}
	return complaints
}

func TestFlagsInDocumentsExist(t *testing.T) {
	report(t, checkFlags(t, repository()))
	wantOne(t, checkFlags(t, tree("README.md", "run `kvserver --data-dir x --no-such`\n",
		"cmd/kvserver/main.go", "package main\nvar _ = \"data-dir\"\n")), "--no-such")
}

func TestMakeTargetsInDocumentsExist(t *testing.T) {
	report(t, checkTargets(t, repository()))
	wantOne(t, checkTargets(t, tree("Makefile", "run: build\n", "README.md", "`make run`, then `make lunch`\n")), "no target lunch")
}

func TestLinksInDocumentsLead(t *testing.T) {
	report(t, checkLinks(t, repository()))
	wantOne(t, checkLinks(t, tree("docs/a.md", "[b](b.md), [c](c.md#here)\n", "docs/b.md", "")), "c.md")
}

// namedTest matches the name of a test, fuzz target or benchmark in back quotes.
var namedTest = regexp.MustCompile("`((?:Test|Fuzz|Benchmark)[A-Z][A-Za-z0-9_]*)")

// checkTests compares the tests that documents name with those that exist.
func checkTests(t *testing.T, tree fs.FS) (complaints []string) {
	known := map[string]bool{}
	for _, s := range sources(t, tree) {
		for _, d := range s.syntax.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && s.isTest() {
				known[f.Name.Name] = true
			}
		}
	}
	for name, text := range documents(t, tree) {
		for _, match := range namedTest.FindAllStringSubmatch(text, -1) {
			if !known[match[1]] {
				complaints = append(complaints, fmt.Sprintf("%s: there is no test %s", name, match[1]))
			}
		}
	}
	return complaints
}

func TestTestsInDocumentsExist(t *testing.T) {
	report(t, checkTests(t, repository()))
	wantOne(t, checkTests(t, tree("docs/a.md", "`TestA`, `TestB`\n", "a/a_test.go", "package a\nfunc TestA() {}\n")), "no test TestB")
}

// conflict is the first line of a conflict that a merge has left. It is built from parts, so that this file has none.
var conflict = strings.Repeat("<", 7) + " "

func checkConflicts(t *testing.T, tree fs.FS) (complaints []string) {
	t.Helper()
	for _, name := range files(t, tree, "") {
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(text), "\n") {
			if strings.HasPrefix(line, conflict) {
				complaints = append(complaints, fmt.Sprintf("%s:%d: an unresolved conflict", name, i+1))
			}
		}
	}
	return complaints
}

func TestNoFileHasAnUnresolvedConflict(t *testing.T) {
	report(t, checkConflicts(t, repository()))
	wantOne(t, checkConflicts(t, tree("docs/a.md", "text\n"+conflict+"HEAD\n")), "docs/a.md:2")
}

// datedRow matches a row of the bug ledger, which begins with its date.
var datedRow = regexp.MustCompile(`(?m)^\| 20\d\d-.*$`)

// checkLedger finds rows that are there twice, as a merge of two changes of the end of a document leaves them.
func checkLedger(t *testing.T, tree fs.FS) (complaints []string) {
	for name, text := range documents(t, tree) {
		seen := map[string]bool{}
		for _, row := range datedRow.FindAllString(text, -1) {
			if seen[row] {
				complaints = append(complaints, fmt.Sprintf("%s: this row is there twice: %.80s", name, row))
			}
			seen[row] = true
		}
	}
	return complaints
}

func TestEachRowOfTheLedgerIsThereOnce(t *testing.T) {
	report(t, checkLedger(t, repository()))
	wantOne(t, checkLedger(t, tree("docs/a.md", "| 2026-01-01 | one |\n| 2026-01-01 | two |\n| 2026-01-01 | one |\n")), "twice: | 2026-01-01 | one")
}
