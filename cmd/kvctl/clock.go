package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) clockCommand() *cobra.Command {
	clock := &cobra.Command{
		Use:   "clock",
		Short: "Show the time by the server's clock",
		Long: `Show the time by the clock of the server's store, and how far the system's time is from it. The store's clock never goes back, and follows the
system's time by at most a tenth of the time that passes, so that a jump of the system's time expires nothing at once.`,
		Example: "  kvctl clock",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.clock(cmd.Context(), false) },
	}
	clock.AddCommand(&cobra.Command{
		Use:   "accept",
		Short: "Let the server's clock adopt the system's time",
		Long: `Let the server's clock adopt the system's time at once, if that is later. Keys whose time to live ends in between expire. Use it when the system's
time is right. A system's time that is earlier is refused: the server's clock runs slower until they agree.`,
		Example: "  kvctl clock accept",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.clock(cmd.Context(), true) },
	})
	return clock
}

func (a *app) clock(ctx context.Context, accept bool) error {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	return a.withClient(func(c *client.Client) error {
		now, err := c.Clock(ctx, accept)
		if err != nil {
			return err
		}
		if a.formatOr(formatTable) != formatTable {
			return a.print("{\"time_us\":%d,\"difference_us\":%d,\"advanced_us\":%d}\n", now.GetTimeUs(), now.GetDifferenceUs(), now.GetAdvancedUs())
		}
		at := time.UnixMicro(int64(now.GetTimeUs())).Format(time.RFC3339Nano)
		return a.print("%s, the system's time is %+.3f s from it, advanced by %.3f s\n", at, float64(now.GetDifferenceUs())/1e6, float64(now.GetAdvancedUs())/1e6)
	})
}
