package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) watchCommand() *cobra.Command {
	var r rangeFlags
	var o client.WatchOptions
	var after beginning
	var tokenFile string
	cmd := &cobra.Command{
		Use:   "watch [PREFIX]",
		Short: "Print the changes of a range as they are committed",
		Long: `Print the changes of the keys that begin with PREFIX, of those between --start and --end, or of all, as they are committed and durable.
It begins now, after the commit or the time of --after, or with --snapshot: then the current entries come first. It goes on until it is interrupted,
and continues by itself where it was when the server is back after a restart.

With --from-token it continues after what was printed last, if FILE exists, and keeps FILE up to date: when it begins, and after each change that was printed,
FILE has the token to continue with.

Each line of jsonl output is a change: its epoch, what happened (set, delete, loaded; snapshot for an entry of --snapshot), key and value.
"end" marks the last change of a commit. If the server cannot go on with a snapshot of which a part was printed, after a restart for instance,
the change "begin" says that this part does not count, and another snapshot follows.`,
		Example: `  kvctl watch user/
  kvctl watch --snapshot --from-token users.token --prefix user/ -o jsonl | ./consume`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 && r.given() {
				return errors.New("watch: give either PREFIX or a range, not both")
			}
			if o.Snapshot && cmd.Flags().Changed("after") {
				return errors.New("watch: give either --snapshot or --after, not both")
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
			if o.AfterTime = after.time; cmd.Flags().Changed("after") && after.time.IsZero() {
				o.After = &after.epoch
			}
			if o.Token, err = readToken(tokenFile); err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error { return a.watch(cmd, c, keyRange, o, tokenFile) })
		},
	}
	r.add(cmd)
	flags := cmd.Flags()
	flags.StringVar(&tokenFile, "from-token", "", "continue with the token in `FILE`, if it exists, and write it there after each change that was printed")
	flags.Var(&after, "after", "begin after the commit with this `EPOCH|TIME`: 41, 10:32, 10:32:05, 2026-01-31T10:32:05Z, -5m; 0 is before the first commit")
	flags.BoolVar(&o.ExpandLoads, "expand-loads", false, "print the entries of bulk loads instead of their ranges")
	flags.BoolVar(&o.Snapshot, "snapshot", false, "print the current entries first")
	flags.BoolVar(&o.Difference, "difference", false, "if the server's log does not reach back far enough, print what has changed instead of failing")
	flags.BoolVar(&o.Previous, "previous", false, "print the value before each change, too")
	flags.BoolVar(&o.KeysOnly, "keys-only", false, "leave out the values")
	return cmd
}

// readToken reads the token that an earlier run has left, if there is one.
func readToken(file string) ([]byte, error) {
	if file == "" {
		return nil, nil
	}
	if err := regular(file); err != nil { // a pipe would keep the read waiting, and be replaced afterwards
		return nil, fmt.Errorf("--from-token: %w", err)
	}
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	token, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(text)))
	if err != nil {
		return nil, fmt.Errorf("%s has no token: %w; remove the file to begin anew", file, err)
	}
	if len(token) == 0 { // a crash of the machine may leave that: without a token, the watch would leave out what comes before now
		return nil, fmt.Errorf("%s is empty, expected a token; remove the file to begin anew, with --snapshot to miss nothing", file)
	}
	return token, nil
}

// writeToken replaces the token in a file. A crash of the machine may leave an empty file, which readToken refuses.
func writeToken(file string, token []byte) error {
	return replaceFile(file, []byte(base64.StdEncoding.EncodeToString(token)+"\n"), false)
}

func (a *app) watch(cmd *cobra.Command, c *client.Client, r client.Range, o client.WatchOptions, tokenFile string) error {
	ctx, cancel := a.longRunning(cmd)
	defer cancel()
	p := &changePrinter{app: a, w: bufio.NewWriterSize(a.out, 64<<10), format: a.formatOr(formatJSONL), o: &o}
	return p.printAll(cmd.Context(), c.Watch(ctx, []client.Range{r}, o), func(token []byte) error {
		if tokenFile == "" {
			return nil
		}
		return writeToken(tokenFile, token)
	})
}

// changePrinter prints changes as they come. The output is complete after each update.
type changePrinter struct {
	app    *app
	w      *bufio.Writer
	format string
	o      *client.WatchOptions
	limit  int // of lines; 0: there is none
	line   []byte

	printed int  // lines
	begun   bool // an entry of a snapshot was printed
}

// full reports whether as many lines were printed as there may be.
func (p *changePrinter) full() bool { return p.limit > 0 && p.printed >= p.limit }

// change is one line.
type change struct {
	epoch client.Epoch
	time  time.Time
	kind  string
	event client.Event
	end   bool
}

// printAll prints what a watch delivers, and calls printed with each token afterwards, until there were as many lines as there may be.
// An error is none if the context has ended: then the watch was interrupted.
func (p *changePrinter) printAll(ctx context.Context, updates iter.Seq2[client.Update, error], printed func(token []byte) error) error {
	for u, err := range updates {
		if err != nil {
			if ctx.Err() != nil {
				err = nil
			}
			return errors.Join(err, p.w.Flush())
		}
		if err := p.print(&u); err != nil {
			return err
		}
		if len(u.Token) > 0 {
			if err := printed(u.Token); err != nil {
				return err
			}
		}
		if p.full() {
			return nil
		}
	}
	return nil
}

func (p *changePrinter) print(u *client.Update) error {
	if u.Begin && p.begun { // else there is nothing that would not count
		p.put(&change{epoch: u.Epoch, kind: changeBegin})
	}
	p.begun = p.begun || len(u.Snapshot) > 0 // also of one that goes on with a token of an earlier run
	for i := range u.Snapshot {
		e := &u.Snapshot[i]
		p.put(&change{epoch: e.Epoch, kind: "snapshot", event: client.Event{Kind: client.EventSet, Key: e.Key, Value: e.Value}})
	}
	for i := range u.Difference {
		p.put(&change{epoch: u.Epoch, kind: kindName(u.Difference[i].Kind), event: u.Difference[i]})
	}
	for i := range u.Commits {
		c := &u.Commits[i]
		for j := range c.Events {
			p.put(&change{epoch: c.Epoch, time: c.Time, kind: kindName(c.Events[j].Kind), event: c.Events[j], end: c.End && j == len(c.Events)-1})
		}
	}
	return p.w.Flush()
}

// changeBegin is the kind of a line without a key.
const changeBegin = "begin"

func kindName(k client.EventKind) string {
	switch k {
	case client.EventSet:
		return "set"
	case client.EventDelete:
		return "delete"
	case client.EventLoaded:
		return "loaded"
	}
	return k.String()
}

// put adds a line to the output. Its error is that of the next Flush.
func (p *changePrinter) put(c *change) {
	if p.full() {
		return
	}
	p.printed++
	p.line = p.line[:0]
	switch e := &c.event; p.format {
	case formatTable:
		p.line = fmt.Appendf(p.line, "%-10d %-8s %s", c.epoch, c.kind, p.app.cell(e.Key))
		if e.Kind == client.EventSet && !p.o.KeysOnly {
			p.line = append(append(p.line, "  "...), p.app.cell(e.Value)...)
		}
	case formatRaw:
		p.line = append(append(append(p.line, c.kind...), '\t'), p.app.rawBytes(e.Key)...)
		p.line = append(append(p.line, '\t'), p.app.rawBytes(e.Value)...)
	default:
		p.appendJSON(c)
	}
	_, _ = p.w.Write(append(p.line, '\n'))
}

func (p *changePrinter) appendJSON(c *change) {
	b, e := p.line, &c.event
	b = strconv.AppendUint(append(b, `{"epoch":`...), uint64(c.epoch), 10)
	if !c.time.IsZero() {
		b = append(c.time.UTC().AppendFormat(append(b, `,"time":"`...), time.RFC3339Nano), '"')
	}
	b = append(append(append(b, `,"change":"`...), c.kind...), '"')
	if c.kind == changeBegin {
		p.line = append(b, '}')
		return
	}
	b = appendJSONField(append(b, ','), "key", e.Key, p.app.hex)
	if e.Kind == client.EventSet && !p.o.KeysOnly {
		b = appendJSONField(append(b, ','), "value", e.Value, p.app.hex)
	}
	if e.Previous != nil {
		b = appendJSONField(append(b, ','), "previous", e.Previous, p.app.hex)
	}
	if p.o.Previous && e.PreviousUnavailable {
		b = append(b, `,"previous_unavailable":true`...)
	}
	if e.Kind == client.EventLoaded && len(e.EndKey) > 0 {
		b = appendJSONField(append(b, ','), "end_key", e.EndKey, p.app.hex)
	}
	if c.end {
		b = append(b, `,"end":true`...)
	}
	p.line = append(b, '}')
}
