package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) delCommand() *cobra.Command {
	var f writeFlags
	var r rangeFlags
	var limit uint64
	var g deleteGuard
	cmd := &cobra.Command{
		Use:   "del KEY... | --prefix P | --start S --end E | --all",
		Short: "Delete keys or a range of keys",
		Long: `Delete the given keys, or all keys of a range, atomically, and print the epoch. A key that does not exist is no error.

On a terminal, kvctl counts the keys of a range and asks before it deletes them; --yes answers, --dry-run only counts. In scripts nothing is asked.
--all deletes every key, in several commits.

With a condition (for one key) that does not hold, nothing is deleted and the exit code is 4.`,
		Example: `  kvctl del greeting
  kvctl del user/1 user/2
  kvctl del --if-present greeting
  kvctl del --prefix session/ --dry-run
  kvctl del --prefix session/
  kvctl del --start log/2024 --end log/2025 --limit 100000`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := rejectEmptyBounds(cmd); err != nil {
				return err
			}
			if (len(args) > 0) == (r.given() || g.all) {
				return errors.New("give either keys or a range (--prefix, or --start and --end), or --all")
			}
			if len(args) > 0 && g.dryRun {
				return errors.New("--dry-run counts the keys of a range; give --prefix, --start and --end, or --all")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			keys, err := a.bytesArgs(args)
			if err != nil {
				return err
			}
			var key []byte
			if len(keys) > 0 {
				key = keys[0]
			}
			options, err := f.options(a, cmd, key)
			if err != nil {
				return err
			}
			if len(options) > 0 && len(keys) != 1 && f.conditional(cmd) {
				return usageError{errors.New("del: a condition needs exactly one key")}
			}
			return a.withClient(func(c *client.Client) error {
				if r.given() || g.all {
					return a.deleteRange(cmd, c, &r, &g, limit, options)
				}
				return a.deleteKeys(cmd, c, keys, options)
			})
		},
	}
	f.add(cmd)
	r.add(cmd)
	cmd.Flags().Uint64Var(&limit, "limit", 0, "delete at most `N` keys of a range; 0 means all")
	g.add(cmd)
	return cmd
}

func (f *writeFlags) conditional(cmd *cobra.Command) bool {
	return f.absent || f.present || cmd.Flags().Changed("if-value") || cmd.Flags().Changed("if-epoch")
}

func (a *app) deleteKeys(cmd *cobra.Command, c *client.Client, keys [][]byte, options []client.WriteOption) error {
	if len(keys) == 1 {
		epoch, err := c.Delete(cmd.Context(), keys[0], options...)
		if err != nil {
			return err
		}
		return a.written(epoch)
	}
	var b client.Batch
	for _, key := range keys {
		b.Delete(key)
	}
	epoch, err := c.Write(cmd.Context(), &b, options...)
	if err != nil {
		return err
	}
	return a.written(epoch)
}

func (a *app) deleteRange(
	cmd *cobra.Command, c *client.Client, r *rangeFlags, g *deleteGuard, limit uint64, options []client.WriteOption,
) error {
	keyRange, err := r.keyRange(a)
	if err != nil {
		return err
	}
	if allowed, err := g.allow(cmd, a, c, keyRange, limit); !allowed {
		return err
	}
	var deleted client.RangeDeleted
	if g.all {
		deleted, err = a.deleteEverything(cmd, c, options)
	} else {
		deleted, err = c.DeleteRange(cmd.Context(), keyRange, limit, options...)
	}
	if err != nil {
		return err
	}
	switch a.formatOr(formatJSONL) {
	case formatTable:
		more := ""
		if deleted.More {
			more = ", more are left"
		}
		return a.print("ok, %d deleted, epoch %d%s\n", deleted.Count, deleted.Epoch, more)
	case formatRaw:
		return a.print("%d\n", deleted.Count)
	}
	return a.print("{\"deleted\":%d,\"epoch\":%d,\"more\":%t}\n", deleted.Count, deleted.Epoch, deleted.More)
}

// rejectEmptyBounds refuses a bound that is given and empty: nearly always a shell variable that is not set. Without the bound, all keys
// on that side would be deleted.
func rejectEmptyBounds(cmd *cobra.Command) error {
	for _, name := range []string{"start", "end"} {
		if bound := cmd.Flags().Lookup(name); bound.Changed && bound.Value.String() == "" {
			return fmt.Errorf("del: --%s is empty; for a range without that end, leave the option out", name)
		}
	}
	return nil
}

// rangeFlags name a range of keys.
type rangeFlags struct{ prefix, start, end string }

func (r *rangeFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&r.prefix, "prefix", "", "all keys that begin with this `PREFIX`")
	flags.StringVar(&r.start, "start", "", "first `KEY` of the range")
	flags.StringVar(&r.end, "end", "", "first `KEY` beyond the range")
	cmd.MarkFlagsMutuallyExclusive("prefix", "start")
	cmd.MarkFlagsMutuallyExclusive("prefix", "end")
}

func (r *rangeFlags) given() bool { return r.prefix != "" || r.start != "" || r.end != "" }

func (r *rangeFlags) keyRange(a *app) (client.Range, error) {
	bounds, err := a.bytesArgs([]string{r.prefix, r.start, r.end})
	if err != nil {
		return client.Range{}, err
	}
	return client.Range{Prefix: bounds[0], Start: bounds[1], End: bounds[2]}, nil
}
