package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) restoreKeyCommand() *cobra.Command {
	var at past
	cmd := &cobra.Command{
		Use:   "restore-key KEY --at EPOCH|TIME",
		Short: "Give a key the value that it had",
		Long: `Give KEY the value that it had in a state of the past, or delete it if it did not exist then. It is an ordinary write, with the condition that no
other write comes between: if one does, nothing is written and the exit code is 4. A time to live or lease of then is not restored.`,
		Example: "  kvctl restore-key user/1 --at 10:32\n  kvctl restore-key user/1 --at 41",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if at.epoch == 0 && at.time.IsZero() {
				return usageError{errors.New("--at is missing; expected an epoch or a time")}
			}
			keys, err := a.bytesArgs(args)
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error {
				epoch, err := restoreKey(cmd.Context(), c, keys[0], &at)
				if err != nil {
					return err
				}
				return a.print("{\"epoch\":%d}\n", uint64(epoch))
			})
		},
	}
	cmd.Flags().Var(&at, "at", pastUsage)
	return cmd
}

// restoreKey writes the value that a key had. Epoch zero means that the key has it.
func restoreKey(ctx context.Context, c *client.Client, key []byte, at *past) (client.Epoch, error) {
	now, err := c.Get(ctx, key)
	if err != nil {
		return 0, err
	}
	then, err := c.Get(ctx, key, at.option())
	if err != nil || then.Found == now.Found && then.Epoch == now.Epoch {
		return 0, err
	}
	unchanged := client.If(client.Absent(key))
	if now.Found {
		unchanged = client.If(client.WrittenAt(key, now.Epoch))
	}
	if !then.Found {
		return c.Delete(ctx, key, unchanged)
	}
	return c.Put(ctx, key, then.Data, unchanged)
}
