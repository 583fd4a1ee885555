package lint

import (
	"fmt"
	"go/ast"
	"go/token"
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// retiredWord is a word or phrase that comments, documents and messages do not use. docs/glossary.md has all of them; here are those
// that a pattern finds with few mistakes.
type retiredWord struct {
	pattern string // of a regular expression; a space matches any white space
	use     string
	only    []string // directories and documents to which the rule applies; all if empty
	except  string   // a match of this pattern is allowed
}

var retiredWords = []retiredWord{
	// Agents: the software is the subject.
	{pattern: `[Ww]ho(m)?ever|([Nn]o|[Ss]ome)body|[Ss]omeone|[Nn]o one`, use: "the reader, the writer, the client: name it"},
	{pattern: `[Ww]hom?`, use: "the noun, and \"that\"", except: `[Ww]ho I am`},
	{pattern: `[Hh]e|[Hh]is|[Hh]im(self)?`, use: "it, its"},

	// Order and place.
	{pattern: `in front of`, use: "before"},
	{pattern: `[Bb]ehind`, use: "after (order), lagging (speed)", except: `behind (an? )?(interface|flag|proxy|load balancer|build tag|indirection table)`},
	{pattern: `(stands?|lies|lay|standing|lying) (in|at|on|before|between|beside|outside|there|above|below|near|directly|side by side)`, use: "is, is stored"},

	// Commits and versions.
	{pattern: `[Hh]orizons?`, use: "visibility watermark, GC watermarks"},
	{pattern: `[Ff]rontiers?`, use: "GC low watermark"},
	{pattern: `[Vv]oid (epoch|record)s?|[Vv]oids`, use: "no-op record"},
	{pattern: `[Ss]can tokens?`, use: "snapshot lease, resume token"},
	{pattern: `[Cc]rowded`, use: "long chain"},
	{pattern: `[Ss]weep(s|er|ers|ing)?|[Ss]wept`, use: "vacuum"},
	{pattern: `[Ss]tale (share|version|leaf|leaves)s?`, use: "dead-version ratio, superseded version"},
	{pattern: `[Ll]aps?`, use: "pass"},

	// Log.
	{pattern: `[Cc]laim(s|ed|ing)?`, use: "reservation, reserve", only: []string{"internal/wal", "internal/storage", "internal/mvcc"}},
	{pattern: `[Ii]mages?`, use: "segment buffer", only: []string{"internal/wal"}},
	{pattern: `[Ss]pares|[Ss]pare (segment|file|one)s?|[Bb]lank (segment|file|one)s?`, use: "preallocated segment"},
	{pattern: `[Gg]ather(s|ed|ing)?`, use: "group-commit delay, coalesced reads", only: []string{"internal/wal", "internal/vfs", "docs"}},
	{pattern: `(in|for|more) company`, use: "group"},
	{pattern: `[Tt]estif(y|ies|ied)|[Tt]estimon(y|ies)`, use: "prove, proof"},

	// Tree and data file.
	{pattern: `[Ff]rozen|[Ff]reez(e|es|ing)|[Ff]roze`, use: "immutable (memtable), pinned (checkpoint)"},
	{pattern: `[Ss]ide trees?`, use: "repair tree"},
	{pattern: `[Ll]ost (pages?|ranges?)`, use: "skipped page, skipped range"},
	{pattern: `([Gg]o|[Gg]oes|[Gg]oing|[Ww]ent) (a)?round`, use: "skip"},
	{pattern: `[Ff]oret(ell|ells|old)|[Ff]oresee(s|n|r)?`, use: "prefetch"},
	{pattern: `[Ee]nliven(s|ed)?|[Dd]eaden(s|ed)?`, use: "allocate, free"},
	{pattern: `[Cc]ohorts?`, use: "page generation"},
	{pattern: `[Rr]ow tables?`, use: "indirection table"},
	{pattern: `[Rr]ow ids?`, use: "blob id"},
	{pattern: `[Bb]ulk pages?`, use: "overflow page"},
	{pattern: `[Vv]ectors?`, use: "copy-on-write page array", only: []string{"internal/storage", "docs/formats.md", "docs/architecture.md"}},

	// Cache and throttle.
	{pattern: `[Ll]imbo`, use: "retired frame"},
	{pattern: `[Ss]trangers?`, use: "first-time page"},
	{pattern: `[Ww]armth`, use: "usage count"},
	{pattern: `(HOT|COOL|[Tt]wo|[Ee]ither) bands?`, use: "hot set, cold set"},
	{pattern: `[Hh]urr(y|ies|ied)`, use: "stop throttling; soon"},
	{pattern: `[Pp]res(s|ses|sed)`, use: "update the delay"},
	{pattern: `[Pp]ace[ds]?|[Pp]acing`, use: "throttle, delay, rate"},
	{pattern: `[Dd]ebts?`, use: "delay"},

	// Server, and words of several meanings.
	{pattern: `[Rr]im`, use: "RPC layer"},
	{pattern: `[Cc]onversations?`, use: "transaction stream"},
	{pattern: `[Bb]acklogs?`, use: "ack queue", only: []string{"internal/server"}},
	{pattern: `([Uu]n)?[Ss]ettl(e|es|ed|ing)`, use: "acknowledge, complete, step to"},
}

// exempt texts talk about the retired words, or are what a program has written.
var exempt = []string{"docs/glossary.md", "internal/lint/words_test.go", "bench/results"}

// compiledWord is a rule that is ready for use.
type compiledWord struct {
	retiredWord
	word, allowed *regexp.Regexp
}

func compileWords(words []retiredWord) (all []compiledWord) {
	for _, w := range words {
		c := compiledWord{retiredWord: w, word: spaced(w.pattern)}
		if w.except != "" {
			c.allowed = spaced(w.except)
		}
		all = append(all, c)
	}
	return all
}

func spaced(pattern string) *regexp.Regexp {
	return regexp.MustCompile(`\b(` + strings.ReplaceAll(pattern, " ", `\s+`) + `)\b`)
}

// passage is text of one file, with the line at which it begins.
type passage struct {
	file string
	line int
	text string
}

// anyWord finds each of the words: most passages have none, and one expression is much faster than
// one for each word.
func anyWord(words []retiredWord) *regexp.Regexp {
	patterns := make([]string, len(words))
	for i, w := range words {
		patterns[i] = w.pattern
	}
	return spaced(strings.Join(patterns, "|"))
}

// complaints names each retired word of the passage with its line and its replacement.
func (p passage) complaints(words []compiledWord, anyOf *regexp.Regexp) (all []string) {
	if !anyOf.MatchString(p.text) {
		return nil
	}
	for _, w := range words {
		if len(w.only) > 0 && !below(p.file, w.only) {
			continue
		}
		text := p.text
		if w.allowed != nil {
			text = w.allowed.ReplaceAllStringFunc(text, func(m string) string { return strings.Repeat(" ", len(m)) })
		}
		for _, at := range w.word.FindAllStringIndex(text, -1) {
			all = append(all, fmt.Sprintf("%s:%d: %q is retired; use: %s (docs/glossary.md)",
				p.file, p.line+strings.Count(text[:at[0]], "\n"), strings.Join(strings.Fields(text[at[0]:at[1]]), " "), w.use))
		}
	}
	return all
}

var commentMarks = regexp.MustCompile(`(?m)^\s*//`)

// prose is every passage that people read: comments, messages of production code, documents.
func prose(t *testing.T, tree fs.FS) (all []passage) {
	t.Helper()
	for _, s := range sources(t, tree) {
		if !s.generated() && !below(s.path, exempt) {
			all = append(all, s.prose()...)
		}
	}
	for _, name := range files(t, tree, ".proto") {
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(text), "\n") {
			if _, comment, ok := strings.Cut(line, "//"); ok {
				all = append(all, passage{name, i + 1, comment})
			}
		}
	}
	for name, text := range documents(t, tree) {
		if !below(name, exempt) {
			all = append(all, paragraphs(name, text)...)
		}
	}
	return all
}

// paragraphs cuts a document at its empty lines.
func paragraphs(name, text string) (all []passage) {
	line := 1
	for p := range strings.SplitSeq(text, "\n\n") {
		all = append(all, passage{name, line, p})
		line += strings.Count(p, "\n") + 2
	}
	return all
}

func (s source) prose() (all []passage) {
	for _, group := range s.syntax.Comments {
		from, to := s.positions.Position(group.Pos()), s.positions.Position(group.End())
		all = append(all, passage{s.path, from.Line, commentMarks.ReplaceAllString(s.text[from.Offset:to.Offset], "  ")})
	}
	if s.isTest() {
		return all
	}
	ast.Inspect(s.syntax, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING && strings.Contains(lit.Value, " ") {
			all = append(all, passage{s.path, s.positions.Position(lit.Pos()).Line, lit.Value})
		}
		return true
	})
	return all
}

// checkWords complains about retired words.
func checkWords(t *testing.T, tree fs.FS) (complaints []string) {
	words, anyOf := compileWords(retiredWords), anyWord(retiredWords)
	for _, p := range prose(t, tree) {
		complaints = append(complaints, p.complaints(words, anyOf)...)
	}
	slices.Sort(complaints)
	return complaints
}

func TestTextUsesTheWordsOfTheGlossary(t *testing.T) {
	report(t, checkWords(t, repository()))
}

func TestRetiredWordsAreFound(t *testing.T) {
	wal := func(comment string) fs.FS {
		return tree("internal/wal/a.go", "package wal\n\n"+comment+"\nvar x = 1\n")
	}
	wantOne(t, checkWords(t, wal("// The leaf is swept.")), "internal/wal/a.go:3: \"swept\" is retired; use: vacuum")
	wantOne(t, checkWords(t, wal("// It is in\n// front of it.")), "\"in front of\"")
	wantOne(t, checkWords(t, wal("// One.\n// Two: nobody.")), "a.go:4")
	wantOne(t, checkWords(t, tree("internal/wal/a.go", "package wal\nvar x = \"the side tree\"\n")), "repair tree")
	wantOne(t, checkWords(t, tree("api/a.proto", "message A { // about a lost page\n}\n")), "api/a.proto:1")
	wantOne(t, checkWords(t, tree("docs/a.md", "One.\n\nThe rim.\n")), "docs/a.md:3")
	wantOne(t, checkWords(t, tree("docs/a.md", "One.\n\n\nTwo.\nIn front\nof it, that is in front\nof it.\n")), "docs/a.md:6")
	report(t, checkWords(t, wal("// A compressed trimming, behind a flag, of elapsed whole spaces; sideways trees lost.")))
	report(t, checkWords(t, tree("internal/wal/a_test.go", "package wal\nvar x = \"nobody \"\n")))
}
