package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func (a *app) logCommand() *cobra.Command {
	log := &cobra.Command{
		Use:     "log",
		Short:   "Show what keeps the log",
		Long:    "Show what keeps the log: see kvctl log holders.",
		Example: "  kvctl log holders",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	log.AddCommand(&cobra.Command{
		Use:   "holders",
		Short: "List the readers for which the server keeps segments of the log",
		Long: `List the readers for which the server keeps segments of the log, with the first epoch that each of them needs. The first one is the
checkpoint: commits that the data file lacks. The others end by themselves if their owners do not renew them, and those that yield end when
the disk is full, the largest first.`,
		Example: "  kvctl log holders",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), a.timeout)
			defer cancel()
			return a.withClient(func(c *client.Client) error {
				status, err := c.Status(ctx)
				if err != nil {
					return err
				}
				return a.printHolders(status.GetLogHolders())
			})
		},
	})
	return log
}

func (a *app) printHolders(holders []*kvpb.LogHolder) error {
	format := a.formatOr(formatTable)
	if printsJSON(format) {
		for _, h := range holders {
			if err := a.printMessage(format, h); err != nil {
				return err
			}
		}
		return nil
	}
	rows := [][]string{{"NAME", "OWNER", "FROM EPOCH", "KEPT", "AT MOST", "ENDS IN", "YIELDS"}}
	for _, h := range holders {
		most, ends := "-", "-"
		if h.GetBytesMax() > 0 {
			most = size(h.GetBytesMax())
		}
		if h.GetExpiresIn() != nil {
			ends = h.GetExpiresIn().AsDuration().Round(time.Second).String()
		}
		rows = append(rows, []string{h.GetName(), h.GetOwner(), strconv.FormatUint(h.GetEpoch(), 10), size(h.GetBytes()), most, ends, fmt.Sprint(h.GetYields())})
	}
	return a.writeTable(rows)
}
