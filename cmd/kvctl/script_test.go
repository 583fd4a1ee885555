package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client/clienttest"
	"github.com/epochkv/epochkv/internal/testseed"
)

var update = flag.Bool("update", false, "rewrite the expected output in testdata")

// TestScripts runs the scripts in testdata against a server of their own and compares what kvctl prints. A script is a row of steps, each
// ending with an empty line:
//
//	# comment
//	stdin TEXT            what standard input has for the next command; TEXT is a Go string literal
//	file NAME             the lines up to "----" are written to the file
//	pass COUNT            so many answers of the server are left alone
//	fail CODE REASON      the server's next answer is this error
//	terminal on|off|N     whether standard output is a terminal, and of how many columns
//	typing on|off         whether a person types standard input and reads standard error
//	kvctl ARGS...         a command; words may be Go string literals
//	----
//	standard output, then standard error with "! " before each line, then the exit code unless it is 0
//
// "go test ./cmd/kvctl -run TestScripts -update" rewrites the text after "----".
func TestScripts(t *testing.T) {
	testseed.SkipUnderRace(t)
	scripts, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, path := range scripts {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) { runScript(t, path, clienttest.Start(t)) })
	}
}

type script struct {
	t        *testing.T
	server   *clienttest.Server
	dir      string
	stdin    string
	terminal bool
	columns  int  // of the terminal; 0: it has no size
	typing   bool // a person types standard input, and reads standard error
}

func runScript(t *testing.T, path string, server *clienttest.Server) {
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	s := &script{t: t, server: server, dir: t.TempDir()}
	var result strings.Builder
	for _, step := range strings.Split(strings.TrimSuffix(string(text), "\n"), "\n\n") {
		input, want, compared := strings.Cut(step, "\n----")
		got := s.step(input)
		if result.Len() > 0 {
			result.WriteString("\n")
		}
		result.WriteString(input + "\n")
		if compared {
			result.WriteString("----\n" + got)
		}
		if want = strings.TrimPrefix(want, "\n"); !*update && strings.TrimSuffix(got, "\n") != strings.TrimSuffix(want, "\n") {
			t.Errorf("%s\ngot:\n%s\nwant:\n%s", input, got, want)
		}
	}
	if *update {
		if err := os.WriteFile(path, []byte(result.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// step runs the lines of one step and returns what the last command printed.
func (s *script) step(input string) string {
	lines := strings.Split(input, "\n")
	var printed string
	for i, line := range lines {
		words := splitWords(s.t, line)
		if len(words) == 0 || strings.HasPrefix(line, "#") {
			continue
		}
		switch words[0] {
		case "stdin":
			s.stdin = words[1]
		case "terminal":
			s.columns, _ = strconv.Atoi(words[1])
			s.terminal = words[1] == "on" || s.columns > 0
		case "typing":
			s.typing = words[1] == "on"
		case "pass":
			count, err := strconv.Atoi(words[1])
			if err != nil {
				s.t.Fatal(err)
			}
			s.server.FailNext(make([]error, count)...)
		case "fail":
			s.fail(words[1], words[2])
		case "file":
			content := strings.Join(lines[i+1:], "\n") + "\n"
			if err := os.WriteFile(filepath.Join(s.dir, words[1]), []byte(content), 0o600); err != nil {
				s.t.Fatal(err)
			}
			return ""
		case "kvctl":
			printed = s.kvctl(words[1:])
		default:
			s.t.Fatalf("unknown line %q", line)
		}
	}
	return printed
}

func (s *script) fail(code, reason string) {
	var c codes.Code
	if err := c.UnmarshalJSON([]byte(strconv.Quote(code))); err != nil {
		s.t.Fatal(err)
	}
	s.server.FailNext(clienttest.NewError(c, kvpb.ParseReason(reason), "the test says so"))
}

// What differs from run to run.
var (
	throughput = regexp.MustCompile(`in [0-9.]+ s \(.*\)`)
	uptime     = regexp.MustCompile(`uptime( +)[0-9a-z.]+|"uptime":( ?)"[0-9.]+s"`)
	commitTime = regexp.MustCompile(`[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]{12}|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z`)
	oldest     = regexp.MustCompile(`(oldest readable epoch is) \d+`) // without a retention: when versions were removed last
	holdID     = regexp.MustCompile(`\b[0-9]{16}\b`)
	platform   = regexp.MustCompile(`go1[.0-9]+ [a-z]+/[a-z0-9]+`)
)

func (s *script) kvctl(args []string) string {
	for i, arg := range args { // files are in the script's own directory
		if strings.HasPrefix(arg, "DIR/") {
			args[i] = filepath.Join(s.dir, strings.TrimPrefix(arg, "DIR/"))
		}
	}
	var out, errs bytes.Buffer
	a := &app{
		in: strings.NewReader(s.stdin), out: &out, err: &errs, outTerminal: s.terminal, inTerminal: s.typing, errTerminal: s.typing,
		screen: func() (int, int) { return s.columns, 0 },
		getenv: func(name string) string {
			switch name {
			case endpointEnv:
				return s.server.Endpoint
			case "NO_COLOR":
				return "1"
			}
			return ""
		},
	}
	s.stdin = ""
	code := a.run(context.Background(), args)
	printed := out.String()
	if printed != "" && !strings.HasSuffix(printed, "\n") {
		printed += "(no newline)\n"
	}
	for line := range strings.Lines(errs.String()) {
		printed += "! " + line
	}
	if errs.Len() > 0 && !strings.HasSuffix(printed, "\n") { // after a question
		printed += "\n"
	}
	if code != 0 {
		printed += fmt.Sprintf("exit %d\n", code)
	}
	printed = strings.ReplaceAll(printed, s.dir, "DIR")
	printed = strings.ReplaceAll(printed, s.server.Endpoint, "ENDPOINT")
	printed = throughput.ReplaceAllString(printed, "in T")
	printed = uptime.ReplaceAllString(printed, "uptime T")
	printed = commitTime.ReplaceAllStringFunc(printed, func(at string) string {
		if strings.Contains(momentForms, at) {
			return at
		}
		return "TIME"
	})
	printed = oldest.ReplaceAllString(printed, "$1 N")
	printed = holdID.ReplaceAllString(printed, "ID")
	return platform.ReplaceAllString(printed, "GO PLATFORM")
}

// splitWords splits at spaces; a word that begins with a quote is a Go string literal.
func splitWords(t *testing.T, line string) []string {
	t.Helper()
	var words []string
	for line = strings.TrimSpace(line); line != ""; line = strings.TrimSpace(line) {
		if line[0] != '"' {
			word, rest, _ := strings.Cut(line, " ")
			words, line = append(words, word), rest
			continue
		}
		quoted, err := strconv.QuotedPrefix(line)
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		word, err := strconv.Unquote(quoted)
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		words, line = append(words, word), line[len(quoted):]
	}
	return words
}

func TestEveryVerbShowsExamples(t *testing.T) {
	a := &app{out: io.Discard, err: io.Discard}
	for _, cmd := range a.rootCommand().Commands() {
		if cmd.Example == "" || cmd.Short == "" {
			t.Errorf("kvctl %s has no example or no description", cmd.Name())
		}
		if !strings.Contains(cmd.Example, "kvctl "+cmd.Name()) && !strings.Contains(cmd.Example, "kvctl --hex "+cmd.Name()) {
			t.Errorf("the examples of kvctl %s do not show it", cmd.Name())
		}
	}
}

func TestAnUnreachableServerIsExitCode6(t *testing.T) {
	var errs bytes.Buffer
	a := &app{in: strings.NewReader(""), out: io.Discard, err: &errs, getenv: func(string) string { return "" }}
	began := time.Now()
	code := a.run(t.Context(), []string{"get", "k", "--endpoint", "127.0.0.1:1", "--timeout", "2s"})
	if code != exitUnavailable || !strings.Contains(errs.String(), "Is the server running at 127.0.0.1:1?") {
		t.Errorf("exit %d: %s", code, errs.String())
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("took %v", took)
	}
}
