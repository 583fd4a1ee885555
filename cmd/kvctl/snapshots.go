package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/epochkv/epochkv/client"
)

func (a *app) snapshotsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "snapshots",
		Short: "List and end the snapshots that keep old versions",
		Long: `List and end the snapshots that keep old versions on the server: those of scans, interactive transactions, resume tokens, verifications and
bulk loads. When a snapshot ends, the server can remove the versions that only this snapshot needed.`,
		Example: `  kvctl snapshots list
  kvctl snapshots end 12`,
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(a.snapshotsListCommand(), a.snapshotsEndCommand())
	return cmd
}

func (a *app) snapshotsListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the snapshots, the smallest epoch first",
		Long: `List the snapshots, the smallest epoch first. IDLE is how long the server has been waiting for the client; a scan or a
bulk load that waits longer than the server's --snapshot-timeout ends. EXPIRES is when resume tokens end by themselves.`,
		Example: `  kvctl snapshots list -o json`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error { return a.listSnapshots(cmd, c) })
		},
	}
}

// snapshotRow is a snapshot as JSON shows it.
type snapshotRow struct {
	ID        uint64 `json:"id"`
	Kind      string `json:"kind"`
	Epoch     uint64 `json:"epoch"`
	Age       string `json:"age"`
	Idle      string `json:"idle,omitempty"`
	Peer      string `json:"peer,omitempty"`
	ExpiresIn string `json:"expires_in,omitempty"`
}

func (a *app) listSnapshots(cmd *cobra.Command, c *client.Client) error {
	all, err := c.Snapshots(cmd.Context())
	if err != nil {
		return err
	}
	rows := make([]snapshotRow, len(all))
	for i, s := range all {
		rows[i] = snapshotRow{
			ID: s.GetId(), Kind: s.GetKind().Name(), Epoch: s.GetEpoch(), Peer: s.GetPeer(),
			Age: shownDuration(s.GetAge()), Idle: shownDuration(s.GetIdle()), ExpiresIn: shownDuration(s.GetExpiresIn()),
		}
	}
	if printed, err := printRows(a, rows); printed {
		return err
	}
	table := [][]string{{"ID", "KIND", "EPOCH", "AGE", "IDLE", "EXPIRES", "PEER"}}
	for _, r := range rows {
		table = append(table, []string{fmt.Sprint(r.ID), r.Kind, fmt.Sprint(r.Epoch), r.Age, r.Idle, r.ExpiresIn, r.Peer})
	}
	return a.writeTable(table)
}

// shownDuration is empty for a duration that is not set.
func shownDuration(d *durationpb.Duration) string {
	if d == nil {
		return ""
	}
	return d.AsDuration().Round(time.Millisecond).String()
}

func (a *app) snapshotsEndCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "end ID",
		Short: "End a snapshot, and the request that uses it",
		Long: `End a snapshot by its id in "kvctl snapshots list", and the request that uses it: a transaction is rolled back, a scan gets SNAPSHOT_GONE
and can go on at a newer epoch, a bulk load loads nothing.`,
		Example: `  kvctl snapshots end 12`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := idArg(args[0], "snapshot")
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error { return c.EndSnapshot(cmd.Context(), id) })
		},
	}
}
