package lint

import (
	"go/ast"
	"io/fs"
	"path"
	"regexp"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/doctable"
)

// decisionHead is how a page of docs/adr begins: number and title, date, status.
var decisionHead = regexp.MustCompile(
	`^# (\d{4}): ([^\n]+)\n\nDate: (\d{4}-\d\d-\d\d)\. Status: (accepted|withdrawn on \d{4}-\d\d-\d\d|(?:superseded|accepted, changed) by \[\d{4}\]\([^)]+\))\.\n`)

func checkDecisions(t *testing.T, tree fs.FS) (table string, complaints []string) {
	table = doctable.Head("number", "decision", "date", "status")
	for _, name := range files(t, tree, ".md") {
		if path.Dir(name) != "docs/adr" || path.Base(name) == "README.md" {
			continue
		}
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			t.Fatal(err)
		}
		head := decisionHead.FindStringSubmatch(string(text))
		if head == nil || !strings.HasPrefix(path.Base(name), head[1]+"-") {
			complaints = append(complaints, name+": want `# NNNN: Title` as in the file's name, then `Date: YYYY-MM-DD. Status: accepted.`")
			continue
		}
		table += doctable.Row("["+head[1]+"]("+path.Base(name)+")", head[2], head[3], head[4])
	}
	return table, complaints
}

func TestDecisionTableIsThatOfThePages(t *testing.T) {
	table, complaints := checkDecisions(t, repository())
	report(t, complaints)
	doctable.Check(t, "../../docs/adr/README.md", "decisions", table)
	_, complaints = checkDecisions(t, tree("docs/adr/0001-a.md", "# 0001: A\n\n**Decision.** None.\n"))
	wantOne(t, complaints, "0001-a.md")
}

// codeName matches `Func`, `Type.Method` and `package.Func` in back quotes.
var codeName = regexp.MustCompile("`([A-Za-z]+(?:\\.[A-Za-z]+)?)`")

// checkReading complains about names in the README's section on the source that no declaration has.
func checkReading(t *testing.T, tree fs.FS) (complaints []string) {
	text, err := fs.ReadFile(tree, "README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "## Reading the source\n")
	section, _, _ = strings.Cut(section, "\n## ")
	declared := declarations(t, tree)
	for _, match := range codeName.FindAllStringSubmatch(section, -1) {
		if !declared[match[1]] {
			complaints = append(complaints, "README.md: nothing is called "+match[1])
		}
	}
	return complaints
}

// declarations is the set of types and functions: plain, with the package's name in front, and methods with their type's.
func declarations(t *testing.T, tree fs.FS) map[string]bool {
	set := map[string]bool{}
	for _, s := range sources(t, tree) {
		for _, d := range s.syntax.Decls {
			for _, name := range declared(d) {
				set[name] = true
				if !strings.Contains(name, ".") {
					set[s.syntax.Name.Name+"."+name] = true
				}
			}
		}
	}
	return set
}

func declared(d ast.Decl) (names []string) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		if d.Recv == nil {
			return []string{d.Name.Name}
		}
		receiver := d.Recv.List[0].Type
		if star, ok := receiver.(*ast.StarExpr); ok {
			receiver = star.X
		}
		if base, ok := receiver.(*ast.Ident); ok {
			return []string{base.Name + "." + d.Name.Name}
		}
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			if s, ok := spec.(*ast.TypeSpec); ok {
				names = append(names, s.Name.Name)
			}
		}
	}
	return names
}

func TestReadingTheSourceNamesWhatExists(t *testing.T) {
	report(t, checkReading(t, repository()))
	wantOne(t, checkReading(t, tree("README.md", "## Reading the source\n\n`T.M`, `p.F`, `T.X`\n",
		"p/a.go", "package p\ntype T struct{}\nfunc (t *T) M() {}\nfunc F() {}\n")), "T.X")
}
