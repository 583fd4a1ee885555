package main

import (
	"errors"
	"io"
	"strings"
	"testing"
	"unicode"

	"github.com/spf13/cobra"
)

// TestEveryCommandHasExamplesThatParse: each runnable command shows how it is used, and the command line accepts what is shown.
func TestEveryCommandHasExamplesThatParse(t *testing.T) {
	for _, cmd := range commands(newExampleRoot()) {
		if !cmd.HasSubCommands() && strings.TrimSpace(cmd.Example) == "" {
			t.Errorf("%s: the help has no example", cmd.CommandPath())
		}
		for _, words := range exampleCalls(cmd.Example) {
			if err := parses(words); err != nil {
				t.Errorf("%s: example kvctl %s: %v", cmd.CommandPath(), strings.Join(words, " "), err)
			}
		}
	}
}

// TestExamplesAreCheckedInEachPartOfALine, because most mistakes would be in the parts that are not at its beginning.
func TestExamplesAreCheckedInEachPartOfALine(t *testing.T) {
	for example, want := range map[string]int{
		"kvctl get a": 0,
		"KVCTL_TOKEN=$(kvctl login ann --print) kvctl get a": 0,
		"kvctl get 'a b' # a comment with --wrong":           0,
		"kvctl get a --wrong":                                1,
		"kvctl export | kvctl import --wrong -":              1,
		"x=$(kvctl get --wrong a)":                           1,
		"kvctl get":                                          1,
		"kvctl space \\\n    --wrong":                        1,
		"kvctl put --lease $id alive/$HOSTNAME yes":          0,
		"kvctl gett a":                                       1,
	} {
		failed := 0
		for _, words := range exampleCalls(example) {
			if parses(words) != nil {
				failed++
			}
		}
		if failed != want {
			t.Errorf("%s: %d calls are refused, want %d; calls %q", example, failed, want, exampleCalls(example))
		}
	}
}

func newExampleRoot() *cobra.Command {
	return (&app{out: io.Discard, err: io.Discard, getenv: func(string) string { return "" }}).rootCommand()
}

func commands(root *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{root}
	for _, sub := range root.Commands() {
		all = append(all, commands(sub)...)
	}
	return all
}

// parses asks a new command line whether it accepts the words, and runs nothing.
func parses(words []string) error {
	cmd, rest, err := newExampleRoot().Find(words)
	if err != nil {
		return err
	}
	if err := cmd.ParseFlags(rest); err != nil {
		return err
	}
	if !cmd.Runnable() {
		return errors.New("is no command that runs")
	}
	if err := cmd.ValidateArgs(cmd.Flags().Args()); err != nil {
		return err
	}
	return errors.Join(cmd.ValidateRequiredFlags(), cmd.ValidateFlagGroups())
}

// exampleCalls returns the words after kvctl of each call in shell lines: of pipelines, lists and substitutions, too.
func exampleCalls(example string) (calls [][]string) {
	for line := range strings.SplitSeq(strings.ReplaceAll(example, "\\\n", " "), "\n") {
		for _, words := range simpleCommands(line) {
			for len(words) > 0 && isAssignment(words[0]) {
				words = words[1:]
			}
			if len(words) > 0 && words[0] == "kvctl" {
				calls = append(calls, words[1:])
			}
		}
	}
	return calls
}

func isAssignment(word string) bool {
	name, _, found := strings.Cut(word, "=")
	return found && name != "" && strings.ToUpper(name) == name
}

// simpleCommands splits a line of shell into commands of words: enough of the shell for examples. Redirections are left out.
func simpleCommands(line string) (found [][]string) {
	var words []string
	var word strings.Builder
	inWord, quote := false, byte(0)
	endWord := func() {
		if inWord {
			words = append(words, word.String())
		}
		word.Reset()
		inWord = false
	}
	end := func() {
		endWord()
		found = append(found, words)
		words = nil
	}
	for i := 0; i < len(line); i++ {
		c := line[i]
		switch {
		case quote != 0 && c == quote:
			quote = 0
		case quote == '\'' || quote != 0 && c != '$':
			word.WriteByte(c)
		case c == '\'' || c == '"':
			quote, inWord = c, true
		case c == ' ' || c == '\t':
			endWord()
		case c == '#' && !inWord:
			i = len(line)
		case c == '$' && i+1 < len(line) && line[i+1] == '(':
			i++
			inner, after := substitution(line[i+1:])
			found = append(found, simpleCommands(inner)...)
			word.WriteString("SUBSTITUTED")
			inWord = true
			i = len(line) - len(after) - 1
		case c == '$': // a variable is a number here, which each option and argument accepts
			word.WriteByte('1')
			inWord = true
			for i+1 < len(line) && (line[i+1] == '_' || unicode.IsLetter(rune(line[i+1]))) {
				i++
			}
		case c == '|' || c == ';' || c == '&':
			end()
		case c == '<' || c == '>':
			endWord()
			rest := strings.TrimLeft(line[i+1:], "<>& ")
			i = len(line) - len(rest) + len(strings.SplitN(rest+" ", " ", 2)[0]) - 1
		default:
			word.WriteByte(c)
			inWord = true
		}
	}
	end()
	return found
}

// substitution divides a line after "$(" at the bracket that closes it.
func substitution(text string) (inner, after string) {
	depth := 1
	for i := range len(text) {
		switch text[i] {
		case '(':
			depth++
		case ')':
			depth--
		}
		if depth == 0 {
			return text[:i], text[i+1:]
		}
	}
	return text, ""
}
