package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// valueBytesDefault is the longest value that a server with default options takes. It bounds what is read where the server's own
// limit is not known.
const valueBytesDefault = 16 << 20

// valueBytesMax is the longest value that the server takes: reading more from standard input or a file would be in vain.
func valueBytesMax(limits *kvpb.Limits) int {
	if n := limits.GetValueBytes(); n > 0 {
		return int(min(n, math.MaxInt32))
	}
	return valueBytesDefault
}

// writeFlags are the flags of single writes.
type writeFlags struct {
	durability      string
	absent, present bool
	ifValue         string
	ifEpoch         uint64
	fence           string
}

func (f *writeFlags) add(cmd *cobra.Command) {
	addDurability(cmd, &f.durability)
	flags := cmd.Flags()
	flags.BoolVar(&f.absent, "if-absent", false, "only if the key is not there")
	flags.BoolVar(&f.present, "if-present", false, "only if the key is there")
	flags.StringVar(&f.ifValue, "if-value", "", "only if the key has this `VALUE`")
	flags.Uint64Var(&f.ifEpoch, "if-epoch", 0, "only if the key's value was written at this `EPOCH`")
	flags.StringVar(&f.fence, "fence", "", "only if the lock is held with this token: `NAME=TOKEN`")
	cmd.MarkFlagsMutuallyExclusive("if-absent", "if-present", "if-value", "if-epoch")
}

// options turns the flags into what the client takes, for a write of key.
func (f *writeFlags) options(a *app, cmd *cobra.Command, key []byte) ([]client.WriteOption, error) {
	options, err := durabilityOption(f.durability)
	if err != nil {
		return nil, err
	}
	switch {
	case f.absent:
		options = append(options, client.If(client.Absent(key)))
	case f.present:
		options = append(options, client.If(client.Present(key)))
	case cmd.Flags().Changed("if-value"):
		value, err := a.bytesArg(f.ifValue)
		if err != nil {
			return nil, err
		}
		options = append(options, client.If(client.ValueIs(key, value)))
	case cmd.Flags().Changed("if-epoch"):
		options = append(options, client.If(client.WrittenAt(key, client.Epoch(f.ifEpoch))))
	}
	if f.fence == "" {
		return options, nil
	}
	fence, err := a.fenceArg(f.fence)
	return append(options, client.If(fence)), err
}

// fenceArg reads a fence. The name of a lock may have the character =.
func (a *app) fenceArg(arg string) (client.Condition, error) {
	at := strings.LastIndexByte(arg, '=')
	token, err := strconv.ParseUint(arg[at+1:], 10, 64)
	if at < 1 || err != nil {
		return client.Condition{}, usageError{fmt.Errorf("--fence %q: expected NAME=TOKEN", arg)}
	}
	name, err := a.bytesArg(arg[:at])
	return client.HeldWith(name, client.Epoch(token)), err
}

func addDurability(cmd *cobra.Command, durability *string) {
	cmd.Flags().StringVar(durability, "durability", "", "`WHEN` the write is acknowledged: sync (on disk) or async (visible); default: the server's setting")
}

func durabilityOption(durability string) ([]client.WriteOption, error) {
	switch durability {
	case "":
		return nil, nil
	case "sync":
		return []client.WriteOption{client.Sync()}, nil
	case "async":
		return []client.WriteOption{client.Async()}, nil
	}
	return nil, usageError{fmt.Errorf("--durability %q: must be sync or async", durability)}
}

func (a *app) putCommand() *cobra.Command {
	var f writeFlags
	var lease uint64
	var l lifetimeFlags
	cmd := &cobra.Command{
		Use:   "put KEY VALUE|-",
		Short: "Set a key",
		Long: `Set KEY to VALUE and print the epoch of the write. "-" takes the value from standard input, byte for byte.

With --ttl or --expires-at the key expires: it is deleted at most a second after that time, and never before. A put without
them makes it not expire any more.

With a condition that does not hold, nothing is written and the exit code is 4.`,
		Example: `  kvctl put greeting hello
  kvctl put photo - < photo.jpg
  kvctl put --if-absent lock/job-7 "$HOSTNAME"
  kvctl put --if-epoch 41 counter 12
  kvctl put --ttl 30m session/7 alice
  kvctl --hex put 00ff c0ffee`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := a.bytesArg(args[0])
			if err != nil {
				return err
			}
			options, err := f.options(a, cmd, key)
			if err != nil {
				return err
			}
			if cmd.Flags().Changed("lease") {
				if lease == 0 {
					return usageError{errors.New("--lease 0: no lease has this id; kvctl lease list shows those that exist")}
				}
				options = append(options, client.AttachTo(lease))
			}
			lifetime, _, err := l.lifetime(cmd)
			if err != nil {
				return err
			}
			options = append(options, client.Expires(lifetime))
			return a.withClient(func(c *client.Client) error {
				value, err := a.valueArg(cmd.Context(), c, args[1])
				if err != nil {
					return err
				}
				epoch, err := c.Put(cmd.Context(), key, value, options...)
				if err != nil {
					return err
				}
				return a.written(epoch)
			})
		},
	}
	f.add(cmd)
	cmd.Flags().Uint64Var(&lease, "lease", 0, "delete the key when the lease with this `ID` ends")
	l.add(cmd)
	return cmd
}

// valueArg is the value itself, or for "-" what standard input has. Standard input is taken as it is, --hex or not.
func (a *app) valueArg(ctx context.Context, c *client.Client, arg string) ([]byte, error) {
	if arg != "-" {
		return a.bytesArg(arg)
	}
	status, err := c.Status(ctx) // for its limits
	if err != nil {
		return nil, err
	}
	limit := valueBytesMax(status.GetLimits())
	value, err := io.ReadAll(io.LimitReader(a.in, int64(limit)+1))
	if err != nil {
		return nil, fmt.Errorf("reading the value: %w", err)
	}
	if len(value) > limit {
		return nil, fmt.Errorf("standard input has more than the %s that the server takes as a value (its --max-value-size)", size(uint64(limit)))
	}
	return value, nil
}
