package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

// deleteAllStep is how many keys del --all deletes in one commit.
const deleteAllStep = 50_000

// deleteGuard decides whether a range is deleted.
type deleteGuard struct{ all, dryRun, yes bool }

func (g *deleteGuard) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.BoolVar(&g.all, "all", false, fmt.Sprintf("delete every key, %d in each commit", deleteAllStep))
	flags.BoolVar(&g.dryRun, "dry-run", false, "count the keys of the range and delete nothing")
	flags.BoolVar(&g.yes, "yes", false, "do not ask before a range is deleted")
	cmd.MarkFlagsMutuallyExclusive("all", "prefix")
	cmd.MarkFlagsMutuallyExclusive("all", "start")
	cmd.MarkFlagsMutuallyExclusive("all", "end")
	cmd.MarkFlagsMutuallyExclusive("all", "limit")
}

// allow counts the keys of a range for --dry-run, and for the question on a terminal. It reports false if nothing is to be deleted.
func (g *deleteGuard) allow(cmd *cobra.Command, a *app, c *client.Client, r client.Range, limit uint64) (bool, error) {
	asks := a.inTerminal && a.errTerminal && !g.yes
	if !g.dryRun && !asks {
		return true, nil
	}
	count, _, err := c.Count(cmd.Context(), r, client.ScanOptions{Limit: limit})
	if err != nil {
		return false, err
	}
	if g.dryRun {
		return false, a.printCount(count)
	}
	if count == 0 {
		return true, nil // there is nothing to lose, and the answer says so
	}
	if a.confirm(fmt.Sprintf("Delete %d keys at %s? [y/N] ", count, a.endpoint)) {
		return true, nil
	}
	return false, errDeclined
}

func (a *app) printCount(count uint64) error {
	switch a.formatOr(formatJSONL) {
	case formatTable:
		return a.print("%d keys would be deleted\n", count)
	case formatRaw:
		return a.print("%d\n", count)
	}
	return a.print("{\"would_delete\":%d}\n", count)
}

// deleteEverything deletes all keys in several commits: what is written meanwhile may be left.
func (a *app) deleteEverything(cmd *cobra.Command, c *client.Client, options []client.WriteOption) (total client.RangeDeleted, err error) {
	for {
		done, err := c.DeleteRange(cmd.Context(), client.Range{}, deleteAllStep, options...)
		if err != nil {
			return total, err
		}
		total.Count += done.Count
		if done.Epoch != 0 {
			total.Epoch = done.Epoch
		}
		if !done.More {
			return total, nil
		}
	}
}
