package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) upgradeCommand() *cobra.Command {
	upgrade := &cobra.Command{
		Use:   "upgrade",
		Short: "Decide that the server will not be downgraded",
		Long: `Decide that the server will not be downgraded: see kvctl upgrade finalize. kvctl status shows the feature level of the store and the newest
one that the server knows.`,
		Example: "  kvctl upgrade finalize",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	upgrade.AddCommand(&cobra.Command{
		Use:   "finalize",
		Short: "Let the store use the newest formats of the server",
		Long: `Let the store use the newest formats of the server. A store that an earlier version has written stays in that version's formats, so that
the earlier version can open it again. After this command earlier versions refuse the store.`,
		Example: "  kvctl upgrade finalize",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), a.timeout)
			defer cancel()
			return a.withClient(func(c *client.Client) error {
				done, err := c.FinalizeUpgrade(ctx)
				if err != nil {
					return err
				}
				if a.formatOr(formatTable) == formatTable {
					return a.print("feature level %d, before %d\n", done.GetFeatureLevel(), done.GetPreviousLevel())
				}
				return a.print("{\"feature_level\":%d,\"previous_level\":%d}\n", done.GetFeatureLevel(), done.GetPreviousLevel())
			})
		},
	})
	return upgrade
}
