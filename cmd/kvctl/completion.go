package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

func (a *app) completionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "completion bash|zsh|fish|powershell",
		Short: "Print a completion script for your shell",
		Long: `Print a script with which a shell completes verbs, flags and their values, names of contexts and options, and keys.

Keys and options come from the server that the command line names. If it does not answer within half a second, none are offered. Keys that a
shell would have to quote are not offered; with --hex keys are hexadecimal, so all of them are.`,
		Example: `  source <(kvctl completion bash)
  kvctl completion zsh > "${fpath[1]}/_kvctl"
  kvctl completion fish > ~/.config/fish/completions/kvctl.fish`,
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{"bash", "zsh", "fish", "powershell"},
		RunE: func(cmd *cobra.Command, args []string) error {
			root := cmd.Root()
			switch args[0] {
			case "bash":
				return root.GenBashCompletionV2(a.out, true)
			case "zsh":
				return root.GenZshCompletion(a.out)
			case "fish":
				return root.GenFishCompletion(a.out, true)
			case "powershell":
				return root.GenPowerShellCompletionWithDesc(a.out)
			}
			return fmt.Errorf("completion: unknown shell %q", args[0])
		},
	}
}
