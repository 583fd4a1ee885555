package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
)

const module = "github.com/epochkv/epochkv"

// source is one parsed Go file of the tree.
type source struct {
	path      string // slash-separated, from the repository's root
	text      string
	syntax    *ast.File
	positions *token.FileSet
}

func (s source) dir() string     { return path.Dir(s.path) }
func (s source) isTest() bool    { return strings.HasSuffix(s.path, "_test.go") }
func (s source) generated() bool { return ast.IsGenerated(s.syntax) }
func (s source) line(n ast.Node) string {
	return s.path + ":" + strconv.Itoa(s.positions.Position(n.Pos()).Line)
}

// imports calls visit with the path of every import.
func (s source) imports(visit func(spec *ast.ImportSpec, name string)) {
	for _, spec := range s.syntax.Imports {
		if name, err := strconv.Unquote(spec.Path.Value); err == nil {
			visit(spec, name)
		}
	}
}

// repository is the tree that this package is part of.
func repository() fs.FS { return os.DirFS("../..") }

// skipped are directories that hold no code or documents of ours.
func skipped(dir string) bool {
	switch path.Base(dir) {
	case ".git", ".cache", "bin", "data", "testdata", "node_modules", "third_party":
		return true
	}
	return false
}

// files returns the names of all files below the root that end in suffix.
func files(t *testing.T, tree fs.FS, suffix string) []string {
	t.Helper()
	var names []string
	err := fs.WalkDir(tree, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && skipped(name):
			return fs.SkipDir
		case !entry.IsDir() && strings.HasSuffix(name, suffix):
			names = append(names, name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// parsed are the sources of the repository, which many tests look at.
var parsed []source

// sources parses every Go file of the tree. Tests do not change what it returns.
func sources(t *testing.T, tree fs.FS) []source {
	t.Helper()
	if tree == repository() {
		if parsed == nil {
			parsed = parse(t, tree)
		}
		return parsed
	}
	return parse(t, tree)
}

func parse(t *testing.T, tree fs.FS) (all []source) {
	t.Helper()
	for _, name := range files(t, tree, ".go") {
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			t.Fatal(err)
		}
		positions := token.NewFileSet()
		syntax, err := parser.ParseFile(positions, name, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, source{name, string(text), syntax, positions})
	}
	return all
}

// tree makes a file system of path and content pairs.
func tree(pairs ...string) fs.FS {
	m := fstest.MapFS{}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = &fstest.MapFile{Data: []byte(pairs[i+1])}
	}
	return m
}

// report fails the test with every complaint.
func report(t *testing.T, complaints []string) {
	t.Helper()
	for _, c := range complaints {
		t.Error(c)
	}
}

// wantOne checks that a broken tree drew exactly one complaint, and that it names the culprit.
func wantOne(t *testing.T, complaints []string, culprit string) {
	t.Helper()
	if len(complaints) != 1 || !strings.Contains(complaints[0], culprit) {
		t.Errorf("complaints %q, want one that names %q", complaints, culprit)
	}
}
