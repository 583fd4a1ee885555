package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

// lifetimeFlags say when a key expires.
type lifetimeFlags struct {
	ttl       time.Duration
	expiresAt string
}

func (f *lifetimeFlags) add(cmd *cobra.Command) {
	cmd.Flags().DurationVar(&f.ttl, "ttl", 0, "the key expires after this `DURATION`: 1s to 100 years (876000h)")
	cmd.Flags().StringVar(&f.expiresAt, "expires-at", "", "the key expires at this `TIME`, as 2026-01-02T15:04:05Z")
	cmd.MarkFlagsMutuallyExclusive("ttl", "expires-at")
}

// lifetime is what the flags say, and whether they say anything.
func (f *lifetimeFlags) lifetime(cmd *cobra.Command) (l client.Lifetime, given bool, err error) {
	switch {
	case cmd.Flags().Changed("ttl"):
		if f.ttl <= 0 {
			return l, false, usageError{fmt.Errorf("--ttl %v: must be at least 1s", f.ttl)}
		}
		return client.For(f.ttl), true, nil
	case cmd.Flags().Changed("expires-at"):
		at, err := time.Parse(time.RFC3339, f.expiresAt)
		if err != nil {
			return l, false, usageError{fmt.Errorf("--expires-at %q: expected a time such as 2026-01-02T15:04:05Z", f.expiresAt)}
		}
		if err := notZero(at); err != nil {
			return l, false, usageError{fmt.Errorf("--expires-at %q: %w", f.expiresAt, err)}
		}
		return client.Until(at), true, nil
	}
	return l, false, nil
}

// lifetime is that of an imported record.
func (r *record) lifetime() client.Lifetime {
	if r.expiresAt == 0 {
		return client.Lifetime{}
	}
	return client.Until(time.UnixMilli(int64(min(r.expiresAt, 1<<62))))
}

func milliseconds(at time.Time) uint64 {
	if at.IsZero() {
		return 0
	}
	return uint64(at.UnixMilli())
}

func (a *app) touchCommand() *cobra.Command {
	var f lifetimeFlags
	var durability string
	cmd := &cobra.Command{
		Use:   "touch KEY --ttl TIME",
		Short: "Change when a key expires",
		Long: `Make KEY expire after another time, and keep its value. A key that is missing stays missing, and the exit code is 4.

A key is deleted at most a second after that time, and never before.`,
		Example: `  kvctl touch session/7 --ttl 30m
  kvctl touch offer --expires-at 2026-12-31T23:59:59Z`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			lifetime, given, err := f.lifetime(cmd)
			if err == nil && !given {
				err = usageError{errors.New("touch: give --ttl or --expires-at")}
			}
			if err != nil {
				return err
			}
			return a.changeExpiry(cmd, args[0], durability, func(key []byte) client.Invocation { return client.Touch(key, lifetime) })
		},
	}
	f.add(cmd)
	addDurability(cmd, &durability)
	return cmd
}

func (a *app) persistCommand() *cobra.Command {
	var durability string
	cmd := &cobra.Command{
		Use:     "persist KEY",
		Short:   "Make a key not expire any more",
		Long:    "Make KEY not expire any more, and keep its value. If it does not expire, or is missing, nothing changes and the exit code is 4.",
		Example: "  kvctl persist session/7",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.changeExpiry(cmd, args[0], durability, client.Persist)
		},
	}
	addDurability(cmd, &durability)
	return cmd
}

// changeExpiry performs an operation that leaves the value as it is, and prints the epoch of the write.
func (a *app) changeExpiry(cmd *cobra.Command, arg, durability string, operation func(key []byte) client.Invocation) error {
	key, err := a.bytesArg(arg)
	if err != nil {
		return err
	}
	options, err := durabilityOption(durability)
	if err != nil {
		return err
	}
	return a.withClient(func(c *client.Client) error {
		out, epoch, err := c.Invoke(cmd.Context(), operation(key), options...)
		if err != nil {
			return err
		}
		if !out.Applied {
			return fmt.Errorf("key %q: %w", key, errNotApplied)
		}
		return a.written(epoch)
	})
}
