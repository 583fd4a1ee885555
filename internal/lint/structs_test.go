package lint

import (
	"fmt"
	"go/ast"
	"go/token"
	"io/fs"
	"path"
	"slices"
	"strings"
	"testing"
)

// structFieldsMax is the largest number of fields of a struct. A larger struct is several things, of which each can have a type and a file.
const structFieldsMax = 20

// wideReason is what the comment of a struct says that has more fields all the same.
const wideReason = "more than 20 fields because"

// wideStructs are the structs that may have more fields, as directory and name. The comment of each says why.
var wideStructs = []string{
	"internal/config.Config",
}

// structType is a declared struct.
type structType struct {
	name    string // directory and name
	at      string
	fields  int // an embedded type is one field
	comment string
}

// structs finds the declared structs of a file.
func (s source) structs() (all []structType) {
	ast.Inspect(s.syntax, func(n ast.Node) bool {
		group, ok := n.(*ast.GenDecl)
		if !ok || group.Tok != token.TYPE {
			return true
		}
		for _, spec := range group.Specs {
			t, ok := spec.(*ast.TypeSpec)
			if !ok {
				continue
			}
			if fields, ok := t.Type.(*ast.StructType); ok {
				found := structType{name: s.dir() + "." + t.Name.Name, at: s.line(t), comment: group.Doc.Text() + t.Doc.Text()}
				for _, f := range fields.Fields.List {
					found.fields += max(len(f.Names), 1)
				}
				all = append(all, found)
			}
		}
		return true
	})
	return all
}

// checkStructs complains about structs with too many fields, and about rows of the table that are not needed.
func checkStructs(t *testing.T, tree fs.FS, wide ...string) (complaints []string) {
	needed := map[string]bool{}
	for _, s := range sources(t, tree) {
		if s.generated() {
			continue
		}
		for _, found := range s.structs() {
			if found.fields <= structFieldsMax {
				continue
			}
			switch {
			case !slices.Contains(wide, found.name):
				complaints = append(complaints, fmt.Sprintf("%s: %s has %d fields, more than %d: divide it, or add it to wideStructs and say why in its comment",
					found.at, path.Base(found.name), found.fields, structFieldsMax))
			case !strings.Contains(strings.Join(strings.Fields(found.comment), " "), wideReason):
				complaints = append(complaints, fmt.Sprintf("%s: the comment of %s does not say that it has %s ...", found.at, path.Base(found.name), wideReason))
			}
			needed[found.name] = true
		}
	}
	for _, name := range wide {
		if !needed[name] {
			complaints = append(complaints, fmt.Sprintf("%s does not need its row in wideStructs of internal/lint: remove the row", name))
		}
	}
	return complaints
}

func TestStructsHaveFewFields(t *testing.T) {
	report(t, checkStructs(t, repository(), wideStructs...))

	large := "struct {\n" + strings.Repeat("\ta, b, c int\n", 6) + "\tErr error\n\tio.Reader\n"
	file := func(comment, more string) fs.FS {
		return tree("p/a.go", "package p\n"+comment+"type T "+large+more+"}\n")
	}
	report(t, checkStructs(t, file("", ""))) // 20
	wantOne(t, checkStructs(t, file("", "\tx int\n")), "T has 21 fields")
	wantOne(t, checkStructs(t, file("", "\tio.Writer\n")), "T has 21 fields")
	wantOne(t, checkStructs(t, file("", "\tx int\n"), "p.T"), "does not say")
	report(t, checkStructs(t, file("// T has more than 20\n// fields because of a test.\n", "\tx int\n"), "p.T"))
	wantOne(t, checkStructs(t, file("", ""), "p.T"), "remove the row")
}
