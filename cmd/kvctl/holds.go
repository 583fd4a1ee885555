package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) holdsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "holds",
		Short: "Keep the past beyond the retention",
		Long: `List, take, renew and end holds. A hold keeps all versions from an epoch on until its deadline, whatever the retention, and across restarts of the
server: every state from the epoch on stays readable. What it keeps takes space in the data file.`,
		Example: `  id=$(kvctl holds take 2h --owner nightly-audit --at 10:32)
  kvctl diff --from 10:32
  kvctl holds end "$id"`,
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(a.holdsListCommand(), a.holdsTakeCommand(), a.holdsRenewCommand(), a.holdsEndCommand())
	return cmd
}

// holdRow is a hold as JSON shows it.
type holdRow struct {
	ID       uint64 `json:"id"`
	Epoch    uint64 `json:"epoch"`
	Deadline string `json:"deadline"`
	Owner    string `json:"owner,omitempty"`
}

func (a *app) holdsListCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the holds",
		Long:    `List the holds, the oldest first. All versions from EPOCH on are kept until DEADLINE, by the server's clock.`,
		Example: `  kvctl holds list -o json`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				all, err := c.Holds(cmd.Context())
				if err != nil {
					return err
				}
				rows, table := make([]holdRow, len(all)), [][]string{{"ID", "EPOCH", "DEADLINE", "OWNER"}}
				for i, h := range all {
					rows[i] = holdRow{ID: h.ID, Epoch: uint64(h.Epoch), Deadline: h.Deadline.UTC().Format(time.RFC3339), Owner: h.Owner}
					table = append(table, []string{fmt.Sprint(h.ID), fmt.Sprint(h.Epoch), rows[i].Deadline, h.Owner})
				}
				if printed, err := printRows(a, rows); printed {
					return err
				}
				return a.writeTable(table)
			})
		},
	}
}

// holdTime reads how long a hold lasts.
func holdTime(arg string) (time.Duration, error) {
	ttl, err := time.ParseDuration(arg)
	if err != nil {
		return 0, usageError{fmt.Errorf("%q is not a duration; expected for instance 30m or 2h", arg)}
	}
	return ttl, nil
}

func (a *app) holdsTakeCommand() *cobra.Command {
	var owner string
	var at past
	cmd := &cobra.Command{
		Use:     "take TIME",
		Short:   "Keep the past from a state on, and print the id of the hold",
		Long:    `Keep all versions from the newest state on, or from that of --at, for a time from 1s to 720h, and print the id of the hold.`,
		Example: `  kvctl holds take 2h --owner nightly-audit`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ttl, err := holdTime(args[0])
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error {
				h, err := c.TakeHold(cmd.Context(), owner, at.moment(), ttl)
				if err != nil {
					return err
				}
				return a.print("%d\n", h.ID)
			})
		},
	}
	cmd.Flags().StringVar(&owner, "owner", "", "`TEXT` that holds list shows")
	cmd.Flags().Var(&at, "at", "keep the past from this `EPOCH|TIME` on; as "+momentForms)
	return cmd
}

func (a *app) holdsRenewCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "renew ID TIME",
		Short:   "Move the deadline of a hold",
		Long:    `Make a hold last for a time from now, if that is longer than it would.`,
		Example: `  kvctl holds renew 1763812800000000 2h`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := idArg(args[0], "hold")
			if err != nil {
				return err
			}
			ttl, err := holdTime(args[1])
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error {
				_, err := c.RenewHold(cmd.Context(), id, ttl)
				return err
			})
		},
	}
}

func (a *app) holdsEndCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "end ID",
		Short:   "End a hold",
		Long:    `End a hold before its deadline. What only it has kept is dropped.`,
		Example: `  kvctl holds end 1763812800000000`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := idArg(args[0], "hold")
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error { return c.EndHold(cmd.Context(), id) })
		},
	}
}
