package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) scanCommand() *cobra.Command {
	var r rangeFlags
	var o client.ScanOptions
	var at past
	var count bool
	cmd := &cobra.Command{
		Use:   "scan [PREFIX]",
		Short: "List the entries of a range, in key order",
		Long: `List the entries whose keys begin with PREFIX, those between --start and --end, or all. The whole scan reads at one epoch.

A table cuts long values; the other formats do not. Raw output is the key, a tab, the value.`,
		Example: `  kvctl scan user/
  kvctl scan --start a --end b --keys-only -o raw
  kvctl scan log/ --reverse --limit 10
  kvctl scan --count`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 && r.given() {
				return errors.New("scan: give either PREFIX or a range, not both")
			}
			return cobra.MaximumNArgs(1)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				r.prefix = args[0]
			}
			keyRange, err := r.keyRange(a)
			if err != nil {
				return err
			}
			o.At, o.AtTime = at.epoch, at.time
			return a.withClient(func(c *client.Client) error {
				if count {
					return a.count(cmd, c, keyRange, o)
				}
				return a.scan(cmd, c, keyRange, o)
			})
		},
	}
	r.add(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&o.Reverse, "reverse", false, "from the last key to the first")
	flags.Uint64Var(&o.Limit, "limit", 0, "end after `N` entries; 0 means all")
	flags.BoolVar(&o.KeysOnly, "keys-only", false, "leave out the values")
	flags.BoolVar(&count, "count", false, "only count the entries")
	flags.Var(&at, "at", pastUsage)
	return cmd
}

func (a *app) scan(cmd *cobra.Command, c *client.Client, r client.Range, o client.ScanOptions) error {
	ctx, cancel := a.longRunning(cmd)
	defer cancel()
	p := a.newEntryPrinter(o.KeysOnly)
	for e, err := range c.Scan(ctx, r, o) {
		if err != nil {
			return errors.Join(err, p.w.Flush())
		}
		if err := p.print(e); err != nil {
			return err
		}
	}
	return p.close()
}

func (a *app) count(cmd *cobra.Command, c *client.Client, r client.Range, o client.ScanOptions) error {
	ctx, cancel := a.longRunning(cmd)
	defer cancel()
	count, at, err := c.Count(ctx, r, o)
	if err != nil {
		return err
	}
	switch a.formatOr(formatJSONL) {
	case formatTable, formatRaw:
		return a.print("%d\n", count)
	}
	return a.print("{\"count\":%d,\"read_epoch\":%d}\n", count, at)
}
