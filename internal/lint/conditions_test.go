package lint

import (
	"fmt"
	"go/ast"
	"go/token"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"testing"
)

var (
	conditionName  = regexp.MustCompile(`^[a-z]+(-[a-z]+)+$`)
	runbookSection = regexp.MustCompile(`(?m)^### ([a-z-]+)$`)
)

// conditionNames are the names of the conditions that a server reports: in functions that make a health.Condition, all literals that look
// like a name.
func conditionNames(t *testing.T, tree fs.FS) map[string]string {
	t.Helper()
	names := map[string]string{}
	for _, s := range sources(t, tree) {
		if s.isTest() || !below(s.dir(), []string{"internal"}) {
			continue
		}
		for _, d := range s.syntax.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && makesConditions(f) {
				ast.Inspect(f, func(n ast.Node) bool {
					lit, ok := n.(*ast.BasicLit)
					if !ok || lit.Kind != token.STRING {
						return true
					}
					if text, err := strconv.Unquote(lit.Value); err == nil && conditionName.MatchString(text) {
						names[text] = s.line(lit)
					}
					return true
				})
			}
		}
	}
	return names
}

// makesConditions reports whether the function has a literal of health.Condition.
func makesConditions(f *ast.FuncDecl) (found bool) {
	ast.Inspect(f, func(n ast.Node) bool {
		if lit, ok := n.(*ast.CompositeLit); ok {
			typ := lit.Type
			if list, ok := typ.(*ast.ArrayType); ok {
				typ = list.Elt
			}
			if sel, ok := typ.(*ast.SelectorExpr); ok && sel.Sel.Name == "Condition" {
				if pkg, ok := sel.X.(*ast.Ident); ok && pkg.Name == "health" {
					found = true
				}
			}
		}
		return true
	})
	return found
}

// checkRunbook compares the conditions with the sections of the runbook. That each section has a remedy is a test of kvctl.
func checkRunbook(t *testing.T, tree fs.FS) (complaints []string) {
	text, err := fs.ReadFile(tree, "docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	names, sections := conditionNames(t, tree), map[string]bool{}
	for _, match := range runbookSection.FindAllStringSubmatch(string(text), -1) {
		sections[match[1]] = true
		if names[match[1]] == "" {
			complaints = append(complaints, fmt.Sprintf("docs/runbook.md: the server reports no condition %s", match[1]))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if !sections[name] {
			complaints = append(complaints, fmt.Sprintf("%s: docs/runbook.md has no section for the condition %s", names[name], name))
		}
	}
	return complaints
}

func TestEachConditionHasItsPageInTheRunbook(t *testing.T) {
	report(t, checkRunbook(t, repository()))
	code := "package server\nfunc f() { add(\"disk-low\"); _ = health.Condition{} }\nfunc g() { add(\"no-condition\") }\n"
	wantOne(t, checkRunbook(t, tree("internal/server/a.go", code, "docs/runbook.md", "# Runbook\n")), "disk-low")
	wantOne(t, checkRunbook(t, tree("internal/server/a.go", code, "docs/runbook.md", "### disk-low\n### disk-high\n")), "disk-high")
}
