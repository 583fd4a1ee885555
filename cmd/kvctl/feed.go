package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) feedCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "feed",
		Short: "List and end the watches of all clients",
		Long: `List and end the watches of all clients of the server. A watch that lags is read from the log, as fast as its client takes it, and delays
no other.`,
		Example: `  kvctl feed list
  kvctl feed end 12`,
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(a.feedListCommand(), a.feedEndCommand())
	return cmd
}

func (a *app) feedListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the watches",
		Long: `List the watches, oldest first. EPOCH is how far a watch is, LAG how many epochs were committed after that, QUEUED the events that wait for
its client, IDLE how long nothing was sent.`,
		Example: `  kvctl feed list -o json`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error { return a.listWatches(cmd, c) })
		},
	}
}

// watchRow is a watch as JSON shows it.
type watchRow struct {
	ID     uint64   `json:"id"`
	State  string   `json:"state"`
	Epoch  uint64   `json:"epoch"`
	Lag    uint64   `json:"lag"`
	Queued uint64   `json:"queued_events"`
	Bytes  uint64   `json:"queued_bytes"`
	Age    string   `json:"age"`
	Idle   string   `json:"idle"`
	Peer   string   `json:"peer"`
	Ranges []string `json:"ranges"`
}

func (a *app) listWatches(cmd *cobra.Command, c *client.Client) error {
	all, err := c.Watches(cmd.Context())
	if err != nil {
		return err
	}
	rows := make([]watchRow, len(all))
	for i, w := range all {
		rows[i] = watchRow{
			ID: w.GetId(), State: w.GetState().Name(), Epoch: w.GetEpoch(), Lag: w.GetLag(), Queued: w.GetQueuedEvents(), Bytes: w.GetQueuedBytes(),
			Age: shownDuration(w.GetAge()), Idle: shownDuration(w.GetIdle()), Peer: w.GetPeer(),
		}
		for _, r := range w.GetRanges() {
			rows[i].Ranges = append(rows[i].Ranges, fmt.Sprintf("%q to %q", r.GetStart(), r.GetEnd()))
		}
	}
	if printed, err := printRows(a, rows); printed {
		return err
	}
	table := [][]string{{"ID", "STATE", "EPOCH", "LAG", "QUEUED", "AGE", "IDLE", "PEER", "RANGES"}}
	for i := range rows {
		r := &rows[i]
		ranges := fmt.Sprint(len(r.Ranges))
		if len(r.Ranges) == 1 {
			ranges = r.Ranges[0]
		}
		table = append(table, []string{
			fmt.Sprint(r.ID), r.State, fmt.Sprint(r.Epoch), fmt.Sprint(r.Lag), fmt.Sprint(r.Queued), r.Age, r.Idle, r.Peer, ranges,
		})
	}
	return a.writeTable(table)
}

func (a *app) feedEndCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "end ID",
		Short:   "End a watch",
		Long:    `End a watch by its id in "kvctl feed list". Its client gets WATCH_ENDED, and can continue with its last token.`,
		Example: `  kvctl feed end 12`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := idArg(args[0], "watch")
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error { return c.EndWatch(cmd.Context(), id) })
		},
	}
}
