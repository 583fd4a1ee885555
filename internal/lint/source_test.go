package lint

import (
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strings"
	"testing"
)

// fileLinesAdvised is where a file begins to hold more than one concept. It is advice: the test only says so.
const fileLinesAdvised = 500

// checkPackageComments wants one package comment per package, in exactly one of its files, and of more than a line for
// packages that others import. Generated packages take theirs from the generator.
func checkPackageComments(t *testing.T, tree fs.FS) (complaints []string) {
	type tally struct {
		comments, files int
		text            string
	}
	packages := map[string]*tally{}
	for _, s := range sources(t, tree) {
		if s.isTest() || s.generated() {
			continue
		}
		p := packages[s.dir()]
		if p == nil {
			p = &tally{}
			packages[s.dir()] = p
		}
		p.files++
		if s.syntax.Doc != nil && s.syntax.Doc.Text() != "" {
			p.comments++
			p.text = s.syntax.Doc.Text()
		}
	}
	for dir, p := range packages {
		name := path.Base(dir)
		switch {
		case p.comments != 1:
			complaints = append(complaints, fmt.Sprintf("%s: %d package comments in %d files, want exactly one", dir, p.comments, p.files))
		case strings.HasPrefix(dir, "internal/") && !strings.HasPrefix(p.text, "Package "):
			complaints = append(complaints, fmt.Sprintf("%s: the package comment does not begin with \"Package %s\"", dir, name))
		}
	}
	return complaints
}

// leftover matches a to-do under its other names; condition is what a to-do must say: when it has to be done.
var (
	leftover  = regexp.MustCompile(`\b(FIXME|XXX|HACK)\b`)
	condition = regexp.MustCompile(`\bTODO(\([^)]+\))?:? (when|once|if|before|as soon as) `)
)

func checkTodos(t *testing.T, tree fs.FS) (complaints []string) {
	for _, s := range sources(t, tree) {
		if s.generated() || s.dir() == "internal/lint" {
			continue
		}
		for _, group := range s.syntax.Comments {
			for _, c := range group.List {
				if leftover.MatchString(c.Text) || strings.Contains(c.Text, "TODO") && !condition.MatchString(c.Text) {
					complaints = append(complaints, s.line(c)+": a to-do names the condition under which it must be done")
				}
			}
		}
	}
	return complaints
}

func TestEveryPackageSaysWhatItIsExactlyOnce(t *testing.T) {
	report(t, checkPackageComments(t, repository()))
	wantOne(t, checkPackageComments(t, tree("internal/wal/a.go", "package wal\n")), "internal/wal: 0 package comments")
	wantOne(t, checkPackageComments(t, tree("internal/wal/a.go", "// Package wal logs.\npackage wal\n",
		"internal/wal/b.go", "// Package wal logs again.\npackage wal\n")), "internal/wal: 2 package comments")
}

func TestEveryTodoNamesItsCondition(t *testing.T) {
	report(t, checkTodos(t, repository()))
	wantOne(t, checkTodos(t, tree("internal/wal/a.go", "package wal\n// TODO: make it faster\n")), "a.go:2")
	report(t, checkTodos(t, tree("internal/wal/a.go", "package wal\n// TODO when segments are compressed: check the flag.\n")))
}

func TestFileLengthAdvice(t *testing.T) {
	for _, s := range sources(t, repository()) {
		if lines := strings.Count(s.text, "\n"); lines > fileLinesAdvised && !s.generated() {
			t.Logf("advice: %s has %d lines; does it hold more than one concept?", s.path, lines)
		}
	}
}
