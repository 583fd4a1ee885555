package main

import (
	"io"
	"regexp"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestPlaceholdersOfOptionsSayWhatTheyHold: --limit N, --rate REQUESTS_PER_SECOND, and not --limit many or --callers int.
func TestPlaceholdersOfOptionsSayWhatTheyHold(t *testing.T) {
	placeholder := regexp.MustCompile(`^[A-Z][A-Z_|=:\[\]]*$`)
	var look func(cmd *cobra.Command)
	look = func(cmd *cobra.Command) {
		cmd.NonInheritedFlags().VisitAll(func(f *pflag.Flag) {
			if name, _ := pflag.UnquoteUsage(f); f.Value.Type() != "bool" && !placeholder.MatchString(name) {
				t.Errorf("%s --%s %s", cmd.CommandPath(), f.Name, name)
			}
		})
		for _, c := range cmd.Commands() {
			look(c)
		}
	}
	look((&app{out: io.Discard, err: io.Discard}).rootCommand())
}
