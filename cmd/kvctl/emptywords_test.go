package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/client/clienttest"
)

// TestEmptyWordsAreRefused: a variable of a shell that is not set must not choose another server, user or directory, nor leave out a condition.
func TestEmptyWordsAreRefused(t *testing.T) {
	server := clienttest.Start(t)
	env := map[string]string{endpointEnv: server.Endpoint}
	for _, line := range []string{
		"del --all --endpoint=", "del --all --context=", "del --prefix k --yes --endpoint=",
		"verify --data-dir=", "put k v --fence=", "put k v --lease=0", "put k v --token-file=",
		"token create --user=", "token list --user=", "user password EMPTY --remove", "user delete EMPTY", "user update bob --remove-role=",
		"role update r --grant r: --action=", "auth explain EMPTY --action all", "context use EMPTY", "context remove EMPTY",
		"watch --from-token=", "backup verify EMPTY --from /nowhere", "backup create --to /nowhere --base=", "restore --latest --from /nowhere --data-dir=", "restore-key EMPTY --at 1", "history EMPTY",
	} {
		args := strings.Fields(line)
		for i := range args {
			args[i] = strings.Replace(args[i], "EMPTY", "", 1)
		}
		if out, errs, code := runWith(t, env, args...); code != exitUsage || out != "" || !strings.Contains(errs, "empty") && !strings.Contains(errs, "--lease 0") {
			t.Errorf("%s: exit code %d, %s%s", line, code, out, errs)
		}
	}
	for _, args := range [][]string{{"put", "k", ""}, {"put", "k", "v", "--if-value", ""}, {"scan", ""}, {"scan", "--prefix", ""}, {"export", ""}} {
		if _, errs, code := runWith(t, env, args...); code != exitOK {
			t.Errorf("%q: exit code %d, %s", args, code, errs)
		}
	}
}

// TestEmptyWordsOfEachCommandAreDecidedOn: what may be empty is a command or an option that exists.
func TestEmptyWordsOfEachCommandAreDecidedOn(t *testing.T) {
	var paths, options []string
	for _, cmd := range commands(newExampleRoot()) {
		paths = append(paths, strings.TrimPrefix(cmd.CommandPath(), "kvctl "))
		for _, name := range emptyOptions {
			if cmd.Flags().Lookup(name) != nil || cmd.PersistentFlags().Lookup(name) != nil {
				options = append(options, name)
			}
		}
	}
	for verb := range emptyFrom {
		if !slices.Contains(paths, verb) {
			t.Errorf("there is no command %s", verb)
		}
	}
	for _, name := range emptyOptions {
		if !slices.Contains(options, name) {
			t.Errorf("there is no option --%s", name)
		}
	}
}
