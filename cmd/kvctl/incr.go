package main

import (
	"fmt"
	"math"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) incrCommand() *cobra.Command {
	var low, high, delta int64
	var durability string
	cmd := &cobra.Command{
		Use:   "incr KEY [DELTA]",
		Short: "Add to the integer at a key",
		Long: `Add DELTA (1 unless given, and it may be negative) to the integer at KEY, in one step on the server, and print the sum. A missing key counts as 0.

If the value is not an integer, or the sum is outside --min and --max, nothing is written and the exit code is 4.`,
		Example: `  kvctl incr visits
  kvctl incr stock/7 --min 0 -- -1
  kvctl incr seats 2 --max 40`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.RangeArgs(1, 2)(cmd, args); err != nil {
				return err
			}
			delta = 1
			if len(args) == 1 {
				return nil
			}
			var err error
			if delta, err = strconv.ParseInt(args[1], 10, 64); err != nil {
				return fmt.Errorf("incr: %q: expected an integer of 64 bits", args[1])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := a.bytesArg(args[0])
			if err != nil {
				return err
			}
			options, err := durabilityOption(durability)
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error {
				return a.invoke(cmd, c, key, client.IncrementWithin(key, delta, low, high), options)
			})
		},
	}
	cmd.Flags().Int64Var(&low, "min", math.MinInt64, "the smallest sum `N` that is allowed")
	cmd.Flags().Int64Var(&high, "max", math.MaxInt64, "the largest sum `N` that is allowed")
	addDurability(cmd, &durability)
	return cmd
}

// invoke does i and prints the new value: alone, so that scripts can use it, or as an entry.
func (a *app) invoke(cmd *cobra.Command, c *client.Client, key []byte, i client.Invocation, options []client.WriteOption) error {
	out, epoch, err := c.Invoke(cmd.Context(), i.ReturnNew(), options...)
	if err != nil {
		return err
	}
	if !out.Applied {
		return fmt.Errorf("key %q: %w", key, errNotApplied)
	}
	return a.printFound(key, client.Value{Found: out.NewFound, Data: out.New, Epoch: epoch})
}
