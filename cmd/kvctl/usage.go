package main

import (
	"regexp"
	"strings"

	"github.com/spf13/cobra"
)

const (
	excludeText = "options that exclude each other: "
	suggestText = "\n\nDid you mean this?" // of the library, before names that are similar
)

// usageTexts are the messages of the libraries that parse command lines, in the words of this program.
var usageTexts = []struct {
	pattern *regexp.Regexp
	text    string
}{
	{regexp.MustCompile(`(?s)^unknown command "([^\n]*)" for "([^\n"]*)"(\n\nDid you mean this\?.*)?$`), `unknown command "$1"; "$2 --help" lists the commands$3`},
	{regexp.MustCompile(`^requires at least (\d+) arg\(s\), only received (\d+)$`), "wrong number of arguments: expected at least $1, got $2"},
	{regexp.MustCompile(`^accepts (\d+) arg\(s\), received (\d+)$`), "wrong number of arguments: expected $1, got $2"},
	{regexp.MustCompile(`^accepts at most (\d+) arg\(s\), received (\d+)$`), "wrong number of arguments: expected at most $1, got $2"},
	{regexp.MustCompile(`^accepts between (\d+) and (\d+) arg\(s\), received (\d+)$`), "wrong number of arguments: expected $1 to $2, got $3"},
	{regexp.MustCompile(`^invalid argument "(.*)" for "kvctl [a-z -]+"$`), `unknown argument "$1"`},
	{regexp.MustCompile(`^unknown flag: (.*)$`), "unknown option $1"},
	{regexp.MustCompile(`^unknown shorthand flag: '(.*)' in (.*)$`), "unknown option $2"},
	{regexp.MustCompile(`^flag needs an argument: (?:'.*' in )?(.*)$`), "option $1 needs a value"},
	{regexp.MustCompile(`^bad flag syntax: (.*)$`), "$1 is not an option"},
	{regexp.MustCompile(`^invalid argument "(.*)" for "(?:-., )?(--[a-z-]+)" flag: (?:strconv\.Parse(?:Int|Uint)|parsing).*$`), `$2 "$1": expected a whole number`},
	{regexp.MustCompile(`^invalid argument "(.*)" for "(?:-., )?(--[a-z-]+)" flag: strconv\.ParseFloat.*$`), `$2 "$1": expected a number`},
	{regexp.MustCompile(`^invalid argument "(.*)" for "(?:-., )?(--[a-z-]+)" flag: time: .*$`), `$2 "$1": expected a duration such as 500ms, 30s or 2h`},
	{regexp.MustCompile(`^invalid argument "(.*)" for "(?:-., )?(--[a-z-]+)" flag: (.*)$`), `$2 "$1": $3`},
	{regexp.MustCompile(`^if any flags in the group \[(.*)\] are set none of the others can be; .*$`), excludeText + "$1"},
	{regexp.MustCompile(`^required flag\(s\) (.*) not set$`), "missing option $1"},
}

// inOurWords is the message of an error of usage.
func inOurWords(text string) string {
	for _, t := range usageTexts {
		if t.pattern.MatchString(text) {
			text = t.pattern.ReplaceAllString(text, t.text)
			break
		}
	}
	if before, names, ok := strings.Cut(text, suggestText); ok {
		return before + "; similar: " + strings.Join(strings.Fields(names), ", ")
	}
	if names, ok := strings.CutPrefix(text, excludeText); ok {
		return excludeText + "--" + strings.Join(strings.Fields(names), ", --")
	}
	return text
}

// usageAdvice shows how a verb is called.
func usageAdvice(verb *cobra.Command) string {
	if verb == nil || !verb.HasParent() {
		return "See: kvctl --help"
	}
	if verb.Name() == "shell" {
		return "\"help\" lists the statements."
	}
	use := strings.TrimSuffix(verb.UseLine(), " [flags]")
	if verb.HasAvailableSubCommands() && !strings.Contains(verb.Use, " ") {
		var names []string
		for _, c := range verb.Commands() {
			if c.IsAvailableCommand() {
				names = append(names, c.Name())
			}
		}
		use = verb.CommandPath() + " " + strings.Join(names, "|")
	}
	return "Usage: " + use + "\n       See: " + verb.CommandPath() + " --help"
}
