package main

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) diffCommand() *cobra.Command {
	var r rangeFlags
	var from, to past
	var o client.DiffOptions
	var limit uint64
	cmd := &cobra.Command{
		Use:   "diff [PREFIX] --from EPOCH|TIME",
		Short: "Show what differs between two states of the past",
		Long: `Show the keys that differ between the state at --from and that at --to, or the newest: those that were added, changed or deleted. The keys are
those that begin with PREFIX, those between --start and --end, or all. A key that was written with the value that it had is shown as changed;
one that was made and deleted in between is not shown. The server reads only those parts of the store in which something has changed.

Raw output is what happened (added, changed or deleted) and the key, with a tab.`,
		Example: `  kvctl diff user/ --from 10:32 --to 10:40
  kvctl diff --from 41 -o jsonl`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 && r.given() {
				return errors.New("diff: give either PREFIX or a range, not both")
			}
			return cobra.MaximumNArgs(1)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if from.epoch == 0 && from.time.IsZero() {
				return usageError{errors.New("--from is missing; expected an epoch or a time")}
			}
			if len(args) == 1 {
				r.prefix = args[0]
			}
			o.To = to.moment()
			keyRange, err := r.keyRange(a)
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error {
				ctx, cancel := a.longRunning(cmd)
				defer cancel()
				p := a.newLinePrinter("CHANGE", "KEY", "OLD EPOCH", "NEW EPOCH", "OLD", "NEW")
				return printLines(p, c.Diff(ctx, keyRange, from.moment(), o), limit, func(k *client.KeyChange) (row []string, raw, json []byte) { return diffLine(a, k, o.KeysOnly) })
			})
		},
	}
	r.add(cmd)
	flags := cmd.Flags()
	flags.Var(&from, "from", "the first state, by `EPOCH|TIME`; as "+momentForms)
	flags.Var(&to, "to", "the second state, by `EPOCH|TIME`; the newest if it is not given")
	flags.Uint64Var(&limit, "limit", 0, "end after `N` keys; 0 means all")
	flags.BoolVar(&o.KeysOnly, "keys-only", false, "leave out the values")
	return cmd
}

func diffLine(a *app, k *client.KeyChange, keysOnly bool) (row []string, raw, json []byte) {
	change := "changed"
	switch {
	case !k.Old.Exists():
		change = "added"
	case !k.New.Exists():
		change = "deleted"
	}
	row = []string{change, a.cell(k.Key), "", "", a.cell(k.Old.Value), a.cell(k.New.Value)}
	raw = fmt.Appendf(nil, "%s\t%s", change, a.rawBytes(k.Key))
	json = appendJSONField(fmt.Appendf(nil, `{"change":%q,`, change), "key", k.Key, a.hex)
	for i, s := range []*client.KeyState{&k.Old, &k.New} {
		if !s.Exists() {
			continue
		}
		name := [...]string{"old", "new"}[i]
		row[2+i] = strconv.FormatUint(uint64(s.Epoch), 10)
		json = fmt.Appendf(json, `,"%s_epoch":%d`, name, s.Epoch)
		if !keysOnly {
			json = appendJSONField(append(json, ','), name, s.Value, a.hex)
		}
	}
	return row, raw, append(json, '}')
}
