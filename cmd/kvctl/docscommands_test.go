package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// TestCommandsInDocumentsExist: what the documents and the files in deploy tell to type is a command, with options that it has.
func TestCommandsInDocumentsExist(t *testing.T) {
	calls, root := 0, newExampleRoot()
	for _, pattern := range []string{"README.md", "docs/*.md", "deploy/*.yaml", "deploy/*/*", "Dockerfile"} {
		files, err := filepath.Glob("../../" + pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: no files, %v", pattern, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil || strings.HasSuffix(file, "/bugs.md") {
				continue // a directory, or the bug ledger, which has mistakes
			}
			for _, words := range callsIn(string(text), strings.HasSuffix(file, ".md")) {
				calls++
				if err := unknownIn(root, words); err != nil {
					t.Errorf("%s: kvctl %s: %v", file, strings.Join(words, " "), err)
				}
			}
		}
	}
	if calls < 200 {
		t.Errorf("%d commands were found, which are fewer than there are", calls)
	}
}

// TestUnknownWordsOfCommandsAreFound, wherever they are.
func TestUnknownWordsOfCommandsAreFound(t *testing.T) {
	for text, want := range map[string]bool{
		"`kvctl status`": false, "`kvctl status -v`": true, "`kvctl hold list`": true, "`kvctl holds lost`": true, "`kvctl put --wrong k v`": true,
		"```\nbin/kvctl scan bash/ --keys-only # a comment\n```": false, "```\nx=$(kvctl scan --keysonly)\n```": true, "`kvctl incr k -- -1`": false, "`kvctl holds`": false,
	} {
		found := false
		for _, words := range callsIn(text, true) {
			found = found || unknownIn(newExampleRoot(), words) != nil
		}
		if found != want {
			t.Errorf("%s: found %v", text, found)
		}
	}
}

var inlineCall = regexp.MustCompile("`((?:bin/)?kvctl [^`\n]*)`")

// callsIn returns the calls of kvctl in a text: in Markdown those in code, elsewhere those in comments and lines.
func callsIn(text string, markdown bool) (calls [][]string) {
	if !markdown {
		for line := range strings.Lines(text) {
			if _, call, ok := strings.Cut(line, "  kvctl "); ok {
				calls = append(calls, exampleCalls("kvctl "+call)...)
			}
		}
		return calls
	}
	for i, part := range strings.Split(text, "```") {
		if i%2 == 1 {
			calls = append(calls, exampleCalls(strings.ReplaceAll(part, "bin/kvctl", "kvctl"))...)
			continue
		}
		for _, found := range inlineCall.FindAllStringSubmatch(part, -1) {
			calls = append(calls, exampleCalls(strings.TrimPrefix(found[1], "bin/"))...)
		}
	}
	return calls
}

// unknownIn finds a command or an option that does not exist. Values of options are not looked at: documents have placeholders there.
func unknownIn(root *cobra.Command, words []string) error {
	cmd, rest, err := root.Find(words)
	if err != nil {
		return err
	}
	for i, word := range rest {
		switch {
		case word == "--":
			return nil
		case i == 0 && cmd.HasSubCommands() && isCommandName(word):
			return fmt.Errorf("%s has no command %s", cmd.CommandPath(), word)
		case strings.HasPrefix(word, "-") && !hasOption(cmd, word):
			return fmt.Errorf("unknown option %s", word)
		}
	}
	return nil
}

// isCommandName tells a name from a placeholder.
func isCommandName(word string) bool { return regexp.MustCompile("^[a-z-]+$").MatchString(word) }

func hasOption(cmd *cobra.Command, word string) bool {
	if name, long := strings.CutPrefix(word, "--"); long {
		name, _, _ = strings.Cut(name, "=")
		return name == "help" || cmd.Flag(strings.TrimRight(name, ".,;:)]")) != nil
	}
	if !regexp.MustCompile("^-[a-z]").MatchString(word) { // a negative number, or standard input
		return true
	}
	return word == "-h" || cmd.Flags().ShorthandLookup(word[1:2]) != nil || cmd.InheritedFlags().ShorthandLookup(word[1:2]) != nil
}
