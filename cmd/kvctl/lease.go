package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func (a *app) leaseCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lease",
		Short: "Grant, keep alive, list and revoke leases",
		Long: `Grant, keep alive, list and revoke leases. The keys that are put with a lease (put --lease) are deleted when it ends: at its deadline, unless
keep-alives come, or when it is revoked.`,
		Example: `  id=$(kvctl lease grant 30s --owner "$HOSTNAME")
  kvctl put --lease "$id" "alive/$HOSTNAME" yes
  kvctl lease keep-alive "$id"`,
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(a.leaseGrantCommand(), a.leaseRevokeCommand(), a.leaseKeepAliveCommand(), a.leaseListCommand(), a.leaseShowCommand())
	return cmd
}

func (a *app) leaseGrantCommand() *cobra.Command {
	var owner string
	cmd := &cobra.Command{
		Use:     "grant TTL",
		Short:   "Make a lease and print its id",
		Long:    `Make a lease with this time to live, from 1s to 87600h, and print its id.`,
		Example: `  kvctl lease grant 30s --owner worker-7`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ttl, err := time.ParseDuration(args[0])
			if err != nil {
				return usageError{fmt.Errorf("%q is not a duration; expected for instance 30s or 5m", args[0])}
			}
			return a.withClient(func(c *client.Client) error {
				id, err := c.GrantLeaseOnce(cmd.Context(), ttl, owner)
				if err != nil {
					return err
				}
				return a.print("%d\n", id)
			})
		},
	}
	cmd.Flags().StringVar(&owner, "owner", "", "`TEXT` that lease list shows")
	return cmd
}

// leaseArg reads the id of a lease.
func leaseArg(arg string) (uint64, error) {
	id, err := strconv.ParseUint(arg, 10, 64)
	if err != nil || id == 0 {
		return 0, usageError{fmt.Errorf("%q is not the id of a lease; kvctl lease list shows them", arg)}
	}
	return id, nil
}

// leaseVerb is a command about one lease.
func (a *app) leaseVerb(use, short, long, example string, do func(ctx context.Context, c *client.Client, id uint64) error) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: long, Example: example, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := leaseArg(args[0])
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error { return do(cmd.Context(), c, id) })
		},
	}
}

func (a *app) leaseRevokeCommand() *cobra.Command {
	return a.leaseVerb("revoke ID", "End a lease", "End a lease now: its keys are deleted, and its locks are released.", "  kvctl lease revoke 42",
		func(ctx context.Context, c *client.Client, id uint64) error { return c.RevokeLease(ctx, id) })
}

func (a *app) leaseKeepAliveCommand() *cobra.Command {
	return a.leaseVerb("keep-alive ID", "Keep a lease alive until a signal comes", `Keep a lease alive until a signal comes. The lease then lives on for its time to live.
If the lease has ended, the exit code is 4.`, "  kvctl lease keep-alive 42",
		func(ctx context.Context, c *client.Client, id uint64) error {
			for until := time.Now().Add(a.timeout); ; {
				left, err := c.KeepAlive(ctx, id)
				switch {
				case ctx.Err() != nil:
					return nil //nolint:nilerr // a signal
				case err == nil:
					until = time.Now().Add(left)
				case time.Now().After(until) || !mayKeepAlive(err):
					return err
				}
				select {
				case <-ctx.Done():
					return nil
				case <-time.After(max(left/3, 100*time.Millisecond)):
				}
			}
		})
}

// mayKeepAlive reports whether the next keep-alive may succeed: also after one that a server which stands still has not answered.
func mayKeepAlive(err error) bool { return retryable(err) || errors.Is(err, context.DeadlineExceeded) }

// retryable reports whether the same request may succeed later.
func retryable(err error) bool {
	e, ok := errors.AsType[*client.Error](err)
	return ok && e.Retryable()
}

// leaseRow is a lease as JSON shows it.
type leaseRow struct {
	ID        uint64 `json:"id"`
	TTL       string `json:"ttl"`
	Remaining string `json:"remaining"`
	Granted   string `json:"granted"`
	Owner     string `json:"owner,omitempty"`
	Revoking  bool   `json:"revoking,omitempty"`
}

func toLeaseRow(l *kvpb.Lease) leaseRow {
	return leaseRow{
		ID: l.GetId(), TTL: shownDuration(l.GetTtl()), Remaining: shownDuration(l.GetRemaining()),
		Granted: l.GetGranted().AsTime().Format(time.RFC3339), Owner: l.GetOwner(), Revoking: l.GetRevoking(),
	}
}

func (a *app) leaseListCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the leases",
		Long:    `List the leases, the smallest id first.`,
		Example: `  kvctl lease list -o json`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				all, err := c.Leases(cmd.Context())
				if err != nil {
					return err
				}
				rows := make([]leaseRow, len(all))
				for i, l := range all {
					rows[i] = toLeaseRow(l)
				}
				return a.printLeases(rows)
			})
		},
	}
}

func (a *app) printLeases(rows []leaseRow) error {
	if printed, err := printRows(a, rows); printed {
		return err
	}
	table := [][]string{{"ID", "TTL", "REMAINING", "GRANTED", "OWNER"}}
	for _, r := range rows {
		if r.Revoking {
			r.Remaining = "ending"
		}
		table = append(table, []string{fmt.Sprint(r.ID), r.TTL, r.Remaining, r.Granted, printable(r.Owner)})
	}
	return a.writeTable(table)
}

// leaseKeysMax is how many keys lease show prints.
const leaseKeysMax = 1000

// leaseShown is a lease and its keys as JSON shows them.
type leaseShown struct {
	leaseRow
	Keys []json.RawMessage `json:"keys"`
	More bool              `json:"more_keys,omitempty"`
}

// keysAsJSON are keys as they are in records.
func (a *app) keysAsJSON(keys [][]byte) []json.RawMessage {
	list := make([]json.RawMessage, len(keys))
	for i, key := range keys {
		r := record{key: key, keyOnly: true}
		list[i] = r.appendJSON(nil, a.hex)
	}
	return list
}

func (a *app) leaseShowCommand() *cobra.Command {
	return a.leaseVerb("show ID", "Show a lease and its keys", "Show a lease, and up to 1000 keys that are deleted when it ends.", "  kvctl lease show 42",
		func(ctx context.Context, c *client.Client, id uint64) error {
			found, err := c.LeaseInfo(ctx, id, leaseKeysMax)
			if err != nil {
				return err
			}
			row := toLeaseRow(found.GetLease())
			if format := a.formatOr(formatJSONL); printsJSON(format) {
				return a.printJSON(format, leaseShown{row, a.keysAsJSON(found.GetKeys()), found.GetMore()})
			}
			if err := a.printLeases([]leaseRow{row}); err != nil {
				return err
			}
			for _, key := range found.GetKeys() {
				if err := a.print("%s\n", a.cell(key)); err != nil {
					return err
				}
			}
			if found.GetMore() {
				_, _ = fmt.Fprintf(a.err, "kvctl: the lease has more keys than the %d shown\n", len(found.GetKeys()))
			}
			return nil
		})
}
