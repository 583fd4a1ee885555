package main

import (
	"bufio"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func (a *app) historyCommand() *cobra.Command {
	var r rangeFlags
	var from, to past
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
				return a.printHistory(versions, limit, o.KeysOnly)
			})
		},
	}
	r.add(cmd)
	flags := cmd.Flags()
	flags.Var(&from, "from", "begin after this `EPOCH or TIME`; as "+momentForms)
	flags.Var(&to, "to", "end with this `EPOCH or TIME`")
	flags.Uint64Var(&limit, "limit", 0, "end after this `many` versions; 0 means all")
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

func (a *app) printHistory(versions iter.Seq2[client.KeyVersion, error], limit uint64, keysOnly bool) error {
	p := a.newLinePrinter("EPOCH", "TIME", "ORIGIN", "CHANGE", "KEY", "VALUE")
	for v, err := range versions {
		if err != nil {
			return errors.Join(err, p.close())
		}
		change := "set"
		if v.Deleted {
			change = "delete"
		}
		if err := p.put(historyLine(a, &v, change, keysOnly)); err != nil {
			return err
		}
		if limit > 0 && p.count == limit {
			break
		}
	}
	return p.close()
}

func historyLine(a *app, v *client.KeyVersion, change string, keysOnly bool) (row []string, raw, json []byte) {
	shown := ""
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

// linePrinter prints lines of which the caller knows all forms, as they come.
type linePrinter struct {
	app    *app
	w      *bufio.Writer
	format string
	header []string
	count  uint64
	rows   [][]string // a table's rows that wait for their widths
	widths []int      // of a table's columns; they only grow
}

func (a *app) newLinePrinter(header ...string) *linePrinter {
	return &linePrinter{app: a, w: bufio.NewWriterSize(a.out, 64<<10), format: a.formatOr(formatJSONL), header: header, widths: make([]int, len(header))}
}

func (p *linePrinter) put(row []string, raw, json []byte) error {
	p.count++
	switch p.format {
	case formatTable:
		if p.count == 1 {
			p.rows = append(p.rows, p.header)
		}
		if p.rows = append(p.rows, row); len(p.rows) < rowsPerChunk {
			return nil
		}
		return p.flushRows()
	case formatRaw:
		json = raw
	case formatJSON:
		separator := "[\n"
		if p.count > 1 {
			separator = ",\n"
		}
		_, err := p.w.WriteString(separator + string(json))
		return err
	}
	_, err := p.w.Write(append(json, '\n'))
	return err
}

func (p *linePrinter) flushRows() error {
	err := writeRows(p.w, p.rows, p.widths)
	p.rows = p.rows[:0]
	return err
}

// close ends the output.
func (p *linePrinter) close() error {
	switch {
	case p.format == formatTable:
		if err := p.flushRows(); err != nil {
			return err
		}
	case p.format == formatJSON && p.count == 0:
		_, _ = p.w.WriteString("[]\n") // Flush has the error
	case p.format == formatJSON:
		_, _ = p.w.WriteString("\n]\n")
	}
	return p.w.Flush()
}
