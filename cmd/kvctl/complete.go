package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/epochkv/epochkv/client"
)

const (
	// Keys offered after Tab: a screen at most, and no noticeable wait.
	completionsMax = 64
	completionWait = 500 * time.Millisecond
)

// keyArguments are the verbs whose arguments are keys or prefixes of keys, and how many of them; 0 is all.
var keyArguments = map[string]int{
	"get": 0, "del": 0, "put": 1, "incr": 1, "cas": 1, "touch": 1, "persist": 1, "history": 1, "restore-key": 1,
	"scan": 1, "watch": 1, "diff": 1, "export": 1,
}

// keyFlags are the flags whose values are keys or prefixes of keys.
var keyFlags = []string{"prefix", "start", "end"}

// flagValues are the values of flags that have a few: by the flag, or by verb and flag if verbs differ.
var flagValues = map[string][]string{
	"output":        {formatTable, formatJSON, formatJSONL, formatRaw},
	"durability":    {"sync", "async"},
	"bulk":          {bulkAuto, bulkAlways, bulkNever},
	"import format": {formatAuto, formatJSONL, formatCSV, formatEtcd},
	"export format": {formatJSONL, formatCSV},
}

// addCompletions says what the script of "kvctl completion" offers after Tab besides verbs and flags. What the server is asked for
// is not offered if the server does not answer at once; nothing is said about that, because the user is typing a command.
func (a *app) addCompletions(cmd *cobra.Command) {
	if count, ok := keyArguments[cmd.Name()]; ok && cmd.Parent() == cmd.Root() {
		cmd.ValidArgsFunction = a.completeKeys(count)
	}
	switch cmd.CommandPath() {
	case "kvctl config get", "kvctl config set":
		cmd.ValidArgsFunction = a.completeOptions
	case "kvctl context use", "kvctl context remove":
		cmd.ValidArgsFunction = a.completeContexts
	}
	if list, ok := nameArguments[cmd.CommandPath()]; ok {
		cmd.ValidArgsFunction = a.completeNames(list)
	}
	flags := func(f *pflag.Flag) {
		var complete cobra.CompletionFunc
		values, ok := flagValues[cmd.Name()+" "+f.Name]
		if !ok {
			values, ok = flagValues[f.Name]
		}
		switch {
		case ok:
			complete = cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
		case f.Name == "context":
			complete = a.completeContexts
		case slices.Contains(keyFlags, f.Name):
			complete = a.completeKeys(0)
		default:
			return
		}
		if err := cmd.RegisterFlagCompletionFunc(f.Name, complete); err != nil {
			panic(err) // the flag exists, and has no completion yet
		}
	}
	cmd.LocalNonPersistentFlags().VisitAll(flags)
	if cmd == cmd.Root() {
		cmd.PersistentFlags().VisitAll(flags)
	}
	for _, sub := range cmd.Commands() {
		a.addCompletions(sub)
	}
}

// completeKeys offers the keys that begin with the word, for the first argumentsMax arguments; 0 is all.
func (a *app) completeKeys(argumentsMax int) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		prefix, err := a.bytesArg(word)
		if err != nil || argumentsMax > 0 && len(args) >= argumentsMax {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var words []string
		a.askServer(cmd, func(ctx context.Context, c *client.Client) {
			for _, key := range keysToOffer(ctx, c, prefix, past{}) {
				if w := string(a.rawBytes(key)); isShellWord(w) && !slices.Contains(args, w) {
					words = append(words, w)
				}
			}
		})
		return words, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeOptions offers the options of the server.
func (a *app) completeOptions(cmd *cobra.Command, args []string, word string) (names []string, _ cobra.ShellCompDirective) {
	a.askServer(cmd, func(ctx context.Context, c *client.Client) {
		options, err := c.Config(ctx)
		if err != nil {
			return
		}
		for _, o := range options {
			if name := o.GetName(); strings.HasPrefix(name, word) && !slices.Contains(args, name) {
				names = append(names, name)
			}
		}
	})
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeContexts offers the names of contexts.
func (a *app) completeContexts(_ *cobra.Command, _ []string, word string) (names []string, _ cobra.ShellCompDirective) {
	file, err := a.readContexts()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	for name := range file.Contexts {
		if strings.HasPrefix(name, word) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, cobra.ShellCompDirectiveNoFileComp
}

// askServer runs ask with a client of the server that the command line names. It is silent about errors.
func (a *app) askServer(cmd *cobra.Command, ask func(ctx context.Context, c *client.Client)) {
	if a.chooseServer(cmd) != nil {
		return
	}
	var err error
	if a.endpoint, err = withPort(a.endpoint); err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionWait)
	defer cancel()
	_ = a.withClient(func(c *client.Client) error { // no help is no harm
		ask(ctx, c)
		return nil
	})
}

// keysToOffer returns the first keys with a prefix, and the last one. A shell inserts what all the keys that it is offered have in
// common: with the last key, in key order, that is what all keys have in common, also if there are more than are offered.
func keysToOffer(ctx context.Context, c *client.Client, prefix []byte, at past) (keys [][]byte) {
	o := client.ScanOptions{KeysOnly: true, Limit: completionsMax, At: at.epoch, AtTime: at.time}
	for e, err := range c.Scan(ctx, client.Prefix(prefix), o) {
		if err != nil {
			return nil // some of the keys would be misleading
		}
		keys = append(keys, slices.Clone(e.Key))
	}
	if len(keys) < completionsMax {
		return keys
	}
	o.Reverse, o.Limit = true, 1
	for e, err := range c.Scan(ctx, client.Prefix(prefix), o) {
		if err != nil {
			return nil
		}
		if string(e.Key) != string(keys[len(keys)-1]) {
			keys = append(keys, slices.Clone(e.Key))
		}
	}
	return keys
}

// isShellWord reports whether a shell takes text as it is. Others are not offered: the shells differ in how they quote.
func isShellWord(text string) bool {
	return text != "" && text[0] != '-' && text[0] != '~' && isPlain([]byte(text)) && !strings.ContainsAny(text, " \"'`\\$&|;<>()[]{}*?!#^")
}
