package main

import (
	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) casCommand() *cobra.Command {
	var absent bool
	var durability string
	cmd := &cobra.Command{
		Use:   "cas KEY OLD NEW",
		Short: "Set a key if it has the expected value",
		Long: `Set KEY to NEW if its value is OLD, atomically on the server. With --if-absent there is no OLD, and the key must not exist.

If the condition does not hold, nothing is written and the exit code is 4.`,
		Example: `  kvctl cas leader node-1 node-2
  kvctl cas --if-absent leader node-1`,
		Args: func(cmd *cobra.Command, args []string) error {
			if absent {
				return cobra.ExactArgs(2)(cmd, args)
			}
			return cobra.ExactArgs(3)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			w, err := a.bytesArgs(args)
			if err != nil {
				return err
			}
			options, err := durabilityOption(durability)
			if err != nil {
				return err
			}
			i := client.PutIfAbsent(w[0], w[1])
			if !absent {
				i = client.CompareAndSet(w[0], w[1], w[2])
			}
			return a.withClient(func(c *client.Client) error { return a.invoke(cmd, c, w[0], i, options) })
		},
	}
	cmd.Flags().BoolVar(&absent, "if-absent", false, "the key must not be there")
	addDurability(cmd, &durability)
	return cmd
}
