package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// An empty word is nearly always a shell variable that is not set. Without its option, or the name that it stands for, most commands mean
// something else: another server, all keys, the files of a server instead of a copy, or the user of the caller. So it is refused before anything is
// sent, unless it has a meaning of its own.

// emptyOptions are the options that may be empty: values, texts for people, and ranges of what is read; del has a rule of its own for these.
var emptyOptions = []string{"if-value", "value", "owner", "label", "delimiter", "prefix", "start", "end", "output"}

// emptyFrom are the commands of which words may be empty, and from which one on: values, the words of another command, and prefixes of what
// is only read.
var emptyFrom = map[string]int{
	"put": 1, "cas": 1, "elect": 1, "lock": 1, "config set": 1,
	"scan": 0, "export": 0, "watch": 0, "diff": 0, "locks": 0,
}

// rejectEmptyWords refuses empty words.
func rejectEmptyWords(cmd *cobra.Command) (err error) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if err == nil && isEmptyOption(f) && !slices.Contains(emptyOptions, f.Name) {
			err = fmt.Errorf("%s: --%s is empty; leave the option out if it is not meant", cmd.Name(), f.Name)
		}
	})
	if err != nil {
		return err
	}
	words, verb := cmd.Flags().Args(), strings.TrimPrefix(cmd.CommandPath(), "kvctl ")
	if from, ok := emptyFrom[verb]; ok {
		words = words[:min(from, len(words))]
	}
	if !slices.Contains(words, "") {
		return nil
	}
	if _, ok := keyArguments[verb]; ok {
		return fmt.Errorf("%s: the key is empty", verb)
	}
	return fmt.Errorf("%s: an argument is empty", verb)
}

// isEmptyOption reports whether an option that was given is empty, or a part of its list.
func isEmptyOption(f *pflag.Flag) bool {
	if list, ok := f.Value.(pflag.SliceValue); ok {
		all := list.GetSlice()
		return len(all) == 0 || slices.Contains(all, "")
	}
	return f.Value.Type() == "string" && f.Value.String() == ""
}
