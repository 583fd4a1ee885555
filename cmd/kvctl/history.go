package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func (a *app) historyCommand() *cobra.Command {
	var r rangeFlags
	var from beginning
	var to past
	var o client.HistoryOptions
	var limit uint64
	cmd := &cobra.Command{
		Use:   "history [KEY]",
		Short: "Show the versions that a key had",
		Long: `Show the versions that KEY had, or the keys of a range, newest first: when each was written or deleted, by which commit, and the value.
It goes back as far as the server keeps every version (--retention, and kvctl holds), and ends with the version that the key had there.

ORIGIN is what made the commit: client, expiry, lease, cleanup or restore. Without it the server's log does not have the commit any more,
and the commit was not later than TIME. A deletion of a key that did not exist may be missing.

Raw output is the epoch, what happened (set or delete), the key and the value, with tabs.`,
		Example: `  kvctl history user/1
  kvctl history user/1 --from 10:32 --limit 5
  kvctl history --prefix user/ --from 41 --to 57 -o jsonl`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 && r.given() || len(args) == 0 && !r.given() {
				return errors.New("history: give either KEY or a range")
			}
			return cobra.MaximumNArgs(1)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.From, o.To = from.moment(), to.moment()
			keys, err := a.bytesArgs(args)
			if err != nil {
				return err
			}
			keyRange, err := r.keyRange(a)
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error {
				ctx, cancel := a.longRunning(cmd)
				defer cancel()
				versions := c.HistoryOf(ctx, keyRange, o)
				if len(keys) == 1 {
					versions = c.History(ctx, keys[0], o)
				}
				p := a.newLinePrinter("EPOCH", "TIME", "ORIGIN", "CHANGE", "KEY", "VALUE")
				return printLines(p, versions, limit, func(v *client.KeyVersion) (row []string, raw, json []byte) { return historyLine(a, v, o.KeysOnly) })
			})
		},
	}
	r.add(cmd)
	flags := cmd.Flags()
	flags.Var(&from, "from", "begin after this `EPOCH|TIME`; as "+momentForms)
	flags.Var(&to, "to", "end with this `EPOCH|TIME`")
	flags.Uint64Var(&limit, "limit", 0, "end after `N` versions; 0 means all")
	flags.BoolVar(&o.KeysOnly, "keys-only", false, "leave out the values")
	return cmd
}

// originName is how an origin is shown; empty if it is not known.
func originName(o client.CommitOrigin) string {
	if o == kvpb.CommitOrigin_COMMIT_ORIGIN_UNSPECIFIED {
		return ""
	}
	return strings.ToLower(strings.TrimPrefix(o.String(), "COMMIT_ORIGIN_"))
}

func historyLine(a *app, v *client.KeyVersion, keysOnly bool) (row []string, raw, json []byte) {
	change, shown := "set", ""
	if v.Deleted {
		change = "delete"
	}
	if !v.Time.IsZero() {
		shown = v.Time.Local().Format("2006-01-02 15:04:05.000")
	}
	row = []string{strconv.FormatUint(uint64(v.Epoch), 10), shown, originName(v.Origin), change, a.cell(v.Key), a.cell(v.Value)}
	raw = fmt.Appendf(nil, "%d\t%s\t%s\t%s", v.Epoch, change, a.rawBytes(v.Key), a.rawBytes(v.Value))
	json = fmt.Appendf(nil, `{"epoch":%d`, v.Epoch)
	if !v.Time.IsZero() {
		json = append(v.Time.UTC().AppendFormat(append(json, `,"time":"`...), time.RFC3339Nano), '"')
	}
	if origin := originName(v.Origin); origin != "" {
		json = fmt.Appendf(json, `,"origin":%q`, origin)
	}
	json = appendJSONField(fmt.Appendf(json, `,"change":%q,`, change), "key", v.Key, a.hex)
	if !v.Deleted && !keysOnly {
		json = appendJSONField(append(json, ','), "value", v.Value, a.hex)
	}
	if !v.ExpiresAt.IsZero() {
		json = fmt.Appendf(json, `,"expires_at_ms":%d`, v.ExpiresAt.UnixMilli())
	}
	return row, raw, append(json, '}')
}
