package main

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// lockRow is a lock as JSON shows it.
type lockRow struct {
	Name        string   `json:"name,omitempty"`
	NameBinary  []byte   `json:"name_base64,omitempty"` // of a name that is not UTF-8
	Lease       uint64   `json:"lease,omitempty"`
	Token       uint64   `json:"token,omitempty"`
	Value       string   `json:"value,omitempty"`
	ValueBinary []byte   `json:"value_base64,omitempty"` // of a value that is not UTF-8
	Waiters     uint32   `json:"waiters"`
	Waiting     []uint64 `json:"waiting_leases,omitempty"` // the first ones
}

// textOrBinary divides bytes by how JSON has them.
func textOrBinary(b []byte) (text string, binary []byte) {
	if utf8.Valid(b) {
		return string(b), nil
	}
	return "", b
}

func toLockRow(l *kvpb.Lock) (r lockRow) {
	h := l.GetHolder()
	r = lockRow{Lease: h.GetLeaseId(), Token: h.GetToken(), Waiters: l.GetWaiters(), Waiting: l.GetWaitingLeases()}
	r.Name, r.NameBinary = textOrBinary(l.GetName())
	r.Value, r.ValueBinary = textOrBinary(h.GetValue())
	return r
}

func (a *app) locksCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "locks [PREFIX]",
		Short: "List the locks and what waits for them",
		Long: `List the locks that are held or waited for, in the order of their names: the lease that holds each, its token, how many requests wait, and the leases of
the first 16 of them.`,
		Example: `  kvctl locks
  kvctl locks jobs/ -o json`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var prefix []byte
			if len(args) > 0 {
				var err error
				if prefix, err = a.bytesArg(args[0]); err != nil {
					return err
				}
			}
			return a.withClient(func(c *client.Client) error {
				all, err := c.Locks(cmd.Context(), prefix)
				if err != nil {
					return err
				}
				return a.printLocks(all)
			})
		},
	}
}

func (a *app) printLocks(all []*kvpb.Lock) error {
	rows := make([]lockRow, len(all))
	for i, l := range all {
		rows[i] = toLockRow(l)
	}
	if printed, err := printRows(a, rows); printed {
		return err
	}
	table := [][]string{{"NAME", "LEASE", "TOKEN", "VALUE", "WAITERS", "WAITING LEASES"}}
	for i, l := range all {
		r := &rows[i]
		table = append(table, []string{
			a.cell(l.GetName()), fmt.Sprint(r.Lease), fmt.Sprint(r.Token), a.cell(l.GetHolder().GetValue()),
			fmt.Sprint(r.Waiters), strings.Trim(fmt.Sprint(r.Waiting), "[]"),
		})
	}
	return a.writeTable(table)
}
