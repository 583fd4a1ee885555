package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) checkpointCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "checkpoint",
		Short: "Merge all commits so far into the data file",
		Long: `Merge all commits so far into the data file, and wait until they are durable there. The server does this automatically. The command is
useful before a copy of the data directory, or to make the next start faster.`,
		Example: "  kvctl checkpoint",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := a.longRunning(cmd)
			defer cancel()
			return a.withClient(func(c *client.Client) error {
				done, err := c.Checkpoint(ctx)
				if err != nil {
					return err
				}
				took := done.GetDuration().AsDuration()
				if a.formatOr(formatTable) == formatTable {
					return a.print("everything up to epoch %d is in the data file, after %s\n", done.GetEpoch(), took.Round(time.Millisecond))
				}
				return a.print("{\"epoch\":%d,\"seconds\":%.3f}\n", done.GetEpoch(), took.Seconds())
			})
		},
	}
}
