package main

import (
	"bytes"
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) getCommand() *cobra.Command {
	var at past
	cmd := &cobra.Command{
		Use:   "get KEY...",
		Short: "Read keys",
		Long: `Read one or more keys, all at one epoch. If any is missing, the exit code is 3.

One key prints its value and nothing else: byte for byte in a pipe, and on a terminal with a line end and with escapes for what would change the terminal. Several keys
print a table on a terminal, and each value on a line in a pipe. JSON is an object for one key
and a list for several. JSON has expires_at_ms, in milliseconds since 1970, for a key that expires.`,
		Example: `  kvctl get greeting
  kvctl get photo > photo.jpg
  kvctl get -o json user/1 user/2
  kvctl get --at 41 counter
  kvctl get --at 10:32 counter`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			keys, err := a.bytesArgs(args)
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error {
				values, err := readValues(cmd.Context(), c, keys, at.option())
				if err != nil {
					return err
				}
				return a.printValues(keys, values)
			})
		},
	}
	cmd.Flags().Var(&at, "at", pastUsage)
	return cmd
}

// readValues reads one key with Get, whose value may have any size, or several at one epoch.
func readValues(ctx context.Context, c *client.Client, keys [][]byte, at client.ReadOption) ([]client.Value, error) {
	if len(keys) == 1 {
		v, err := c.Get(ctx, keys[0], at)
		return []client.Value{v}, err
	}
	return c.BatchGet(ctx, keys, at)
}

// printValues prints what was found, and fails if something was not.
func (a *app) printValues(keys [][]byte, values []client.Value) error {
	p := a.newEntryPrinter(false)
	p.format = a.formatOr(formatRaw)
	if a.format == "" && len(keys) == 1 {
		p.format = formatRaw // the value and nothing else, on a terminal, too
	}
	p.whole, p.columns = true, 0
	if p.format == formatJSON && len(keys) == 1 {
		p.format = formatJSONL // one key, one object: a list is for several
	}
	missing := 0
	var first []byte
	for i, v := range values {
		if !v.Found {
			if missing++; missing == 1 {
				first = keys[i]
			}
			continue
		}
		if err := p.printValue(keys[i], v, len(keys) > 1); err != nil {
			return err
		}
	}
	if err := p.close(); err != nil {
		return err
	}
	switch {
	case missing == 0:
		return nil
	case len(keys) == 1:
		return fmt.Errorf("key %q: %w", first, errNotFound)
	}
	return fmt.Errorf("%d of %d keys, the first of them %q: %w", missing, len(keys), first, errNotFound)
}

// printValue prints one value: raw without anything around it, so that bytes come out as they went in.
func (p *entryPrinter) printValue(key []byte, v client.Value, several bool) error {
	if p.format != formatRaw {
		return p.print(client.Entry{Key: key, Value: v.Data, Epoch: v.Epoch, ExpiresAt: v.ExpiresAt})
	}
	p.count++
	data := p.app.rawBytes(v.Data)
	if p.app.outTerminal && p.app.format == "" {
		data = []byte(printable(string(data))) // so that a value cannot change the terminal; -o raw shows it byte for byte
	}
	_, _ = p.w.Write(data) // Flush has the error
	if several || p.app.hex || p.app.outTerminal && !bytes.HasSuffix(data, []byte("\n")) {
		_ = p.w.WriteByte('\n')
	}
	return nil
}
