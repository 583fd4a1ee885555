package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/peterh/liner"
	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

const (
	historyEnv = "KVCTL_HISTORY"
	// typedBytesMax bounds a line that is not typed in: a value of the largest size, escaped.
	typedBytesMax = 4*valueBytesDefault + 4096
)

func (a *app) shellCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "shell",
		Short: "Execute statements line by line",
		Long: `Read statements and execute each at once: outside a transaction, or inside one between "begin" and "commit". "at EPOCH" and "at TIME" read an earlier state.
"help" lists the statements, Tab completes them and keys, and the arrow keys bring back former lines, which are kept in ~/.kvctl_history
($` + historyEnv + ` names another file; empty keeps none).

Standard input may also be a file or a pipe; then the first error ends the shell with its exit code, and so does its end inside a transaction that writes.`,
		Example: `  kvctl shell
  printf 'begin\nincr n\ncommit\n' | kvctl shell`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				s := &statements{app: a, ctx: cmd.Context(), client: c}
				defer s.abandon()
				lines, err := a.openLines(s)
				if err != nil {
					return err
				}
				return errors.Join(s.readStatements(lines, func() bool { return false }), lines.close())
			})
		},
	}
}

// transactByHand is a shell for one transaction.
func (a *app) transactByHand(s *statements, options []client.TxnOption) error {
	if err := s.open(options); err != nil {
		return err
	}
	s.script = true
	lines, err := a.openLines(s)
	if err != nil {
		return err
	}
	return errors.Join(s.readStatements(lines, func() bool { return s.tx == nil }), lines.close())
}

// readStatements executes lines until there are no more, or until over returns true. A person may go on after an
// error; a file may not.
func (s *statements) readStatements(lines lineSource, over func() bool) error {
	for !over() {
		line, err := lines.next(s.prompt())
		switch {
		case errors.Is(err, io.EOF) && s.tx != nil && s.wrote && !lines.typed():
			return errEndInside
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if word := strings.TrimSpace(line); word == "exit" || word == "quit" {
			return nil
		}
		err = s.execute(line)
		if err == nil {
			continue
		}
		if !lines.typed() || s.ctx.Err() != nil {
			return err
		}
		_ = s.app.report(err) // the exit code is that of the last line
		if over() {
			return saidError{err}
		}
	}
	return nil
}

// errEndInside is a file or a pipe that ends inside a transaction that writes: one that was cut off, or lacks a commit.
var errEndInside = errors.New("the input ends inside a transaction, which was rolled back; end it with commit or rollback")

// saidError is an error that has been reported already.
type saidError struct{ error }

func (e saidError) Unwrap() error { return e.error }

func (s *statements) prompt() string {
	switch {
	case s.tx != nil:
		return "txn> "
	case s.at != (past{}):
		return fmt.Sprintf("@%s> ", s.at.text)
	}
	return "> "
}

// lineSource is where statements come from: a person or a file.
type lineSource interface {
	next(prompt string) (string, error) // io.EOF at the end
	typed() bool
	close() error
}

func (a *app) openLines(s *statements) (lineSource, error) {
	if a.inTerminal {
		return newTerminal(a, s)
	}
	scanner := bufio.NewScanner(a.in)
	scanner.Buffer(nil, typedBytesMax)
	return &fileLines{scanner}, nil
}

type fileLines struct{ scanner *bufio.Scanner }

func (f *fileLines) next(string) (string, error) {
	if f.scanner.Scan() {
		return f.scanner.Text(), nil
	}
	if err := f.scanner.Err(); err != nil {
		return "", err
	}
	return "", io.EOF
}

func (*fileLines) typed() bool { return false }

func (*fileLines) close() error { return nil }

// terminal reads lines that a person edits.
type terminal struct {
	ctx     context.Context
	line    *liner.State
	history string // file; empty for none
	typing  chan typedLine
}

// typedLine is what a prompt returned.
type typedLine struct {
	text string
	err  error
}

// historyLineBytesMax is below what the library reads: it refuses a file with a line of 4 KiB, although it writes such lines.
const historyLineBytesMax = 4000

// historyBytesMax is more than the thousand lines that the library keeps. A longer file is not a history, and is not overwritten.
const historyBytesMax = 2000 * historyLineBytesMax

func newTerminal(a *app, s *statements) (*terminal, error) {
	t := &terminal{ctx: s.ctx, line: liner.NewLiner(), history: a.historyFile(), typing: make(chan typedLine, 1)}
	t.line.SetCtrlCAborts(true)
	t.line.SetTabCompletionStyle(liner.TabPrints)
	t.line.SetWordCompleter(s.complete)
	if t.history == "" {
		return t, nil
	}
	if err := t.readHistory(); err != nil {
		return nil, errors.Join(err, t.line.Close()) // Close restores the terminal
	}
	return t, nil
}

// readHistory reads the lines of the history that the library can read.
func (t *terminal) readHistory() error {
	file, err := os.Open(t.history)
	if err != nil {
		return nil // there is no history yet
	}
	defer func() { _ = file.Close() }() // only read
	text, err := io.ReadAll(io.LimitReader(file, historyBytesMax+1))
	if err == nil && len(text) > historyBytesMax {
		err = fmt.Errorf("%s: longer than a history can be; name another file with $%s", t.history, historyEnv)
	}
	if err != nil {
		return err
	}
	var kept strings.Builder
	for line := range strings.Lines(string(text)) {
		if len(line) <= historyLineBytesMax && utf8.ValidString(line) {
			kept.WriteString(line)
		}
	}
	_, err = t.line.ReadHistory(strings.NewReader(kept.String()))
	return err
}

func (a *app) historyFile() string {
	if name, ok := os.LookupEnv(historyEnv); ok {
		return name
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return home + string(os.PathSeparator) + ".kvctl_history"
}

func (t *terminal) next(prompt string) (string, error) {
	for {
		line, err := t.prompt(prompt)
		if errors.Is(err, liner.ErrPromptAborted) { // Ctrl-C drops the line
			continue
		}
		if err == nil && strings.TrimSpace(line) != "" {
			t.line.AppendHistory(line)
		}
		return line, err
	}
}

// prompt waits for a line, or for a signal, which does not end the library's wait. It is not called again after a signal.
func (t *terminal) prompt(text string) (string, error) {
	go func() {
		line, err := t.line.Prompt(text)
		t.typing <- typedLine{line, err}
	}()
	select {
	case l := <-t.typing:
		return l.text, l.err
	case <-t.ctx.Done():
		return "", context.Cause(t.ctx)
	}
}

func (*terminal) typed() bool { return true }

// close keeps the history, which has values in it, from others' eyes.
func (t *terminal) close() error {
	err := t.line.Close()
	if t.history == "" {
		return err
	}
	file, e := os.OpenFile(t.history, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if e != nil {
		return errors.Join(err, e)
	}
	return errors.Join(err, makePrivate(file), writeHistory(t.line, file), file.Close())
}

// makePrivate takes the rights of others to a file that may have been there with another mode. A device, such as /dev/null, is not kvctl's.
func makePrivate(file *os.File) error {
	info, err := file.Stat()
	if err == nil && info.Mode().IsRegular() {
		err = file.Chmod(0o600)
	}
	return err
}

func writeHistory(line *liner.State, file io.Writer) error {
	_, err := line.WriteHistory(file)
	return err
}

// complete offers what the word before pos may become: a verb, or for verbs that take keys a key.
func (s *statements) complete(line string, pos int) (head string, completions []string, tail string) {
	pos = len(string([]rune(line)[:pos])) // the library counts characters
	start := strings.LastIndexAny(line[:pos], " \t") + 1
	head, word, tail := line[:start], line[start:pos], line[pos:]
	before, err := splitStatement(head)
	switch {
	case err != nil: // inside quotes
	case len(before) == 0:
		for _, name := range append(s.names(), "exit") {
			if strings.HasPrefix(name, word) {
				completions = append(completions, name+" ")
			}
		}
	case verbs[before[0]].keys && (len(before) == 1 || verbs[before[0]].max < 0):
		completions = s.keysBeginningWith(word)
	}
	return head, completions, tail
}

func (s *statements) keysBeginningWith(word string) []string {
	prefix, err := s.app.bytesArg(word)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(s.ctx, completionWait)
	defer cancel()
	var found []string
	for _, key := range keysToOffer(ctx, s.client, prefix, s.at) {
		found = append(found, s.quoteWord(key))
	}
	return found
}

// quoteWord writes bytes as a word of a statement.
func (s *statements) quoteWord(b []byte) string {
	if s.app.hex {
		return string(s.app.rawBytes(b))
	}
	if text := string(b); isPlain(b) && !strings.ContainsAny(text, " \"'#") {
		return text
	}
	return strconv.Quote(string(b))
}
