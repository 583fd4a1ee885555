package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

// scriptBytesMax bounds a script, which is read as a whole so that it can be run again.
const scriptBytesMax = 64 << 20

type txnFlags struct {
	snapshot, readOnly bool
	at                 past
	durability         string
	retries            int
}

func (f *txnFlags) options() ([]client.TxnOption, error) {
	var options []client.TxnOption
	if f.snapshot {
		options = append(options, client.SnapshotIsolation())
	}
	if f.readOnly {
		options = append(options, client.ReadOnly())
	}
	if f.at != (past{}) {
		options = append(options, f.at.begin())
	}
	durability, err := durabilityOption(f.durability)
	for _, o := range durability {
		options = append(options, client.CommitWith(o))
	}
	return options, err
}

func (a *app) txnCommand() *cobra.Command {
	var f txnFlags
	cmd := &cobra.Command{
		Use:   "txn [FILE|-]",
		Short: "Run a transaction from a script, or by hand",
		Long: `Run the statements of FILE, or of standard input, in one transaction, one statement a line, and commit it at the end. A statement that
fails, and "rollback", undo all of it. On a terminal without FILE, statements are typed in, and "commit" ends.

Statements: get, put, del, scan, delrange, incr, append, cas, savepoint NAME, rollback [to NAME], commit. Words with spaces need
'single' or "double" quotes; double quotes take Go's escapes; # begins a comment.

If a concurrent commit was faster, the exit code is 4; --retries runs the script again, with fresh reads, before that.`,
		Example: `  kvctl txn transfer.txn --retries 10
  printf 'incr stock/7 -1\nput order/91 "7, one piece"\n' | kvctl txn
  kvctl txn list
  kvctl txn end 12`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			options, err := f.options()
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error {
				s := &statements{app: a, ctx: cmd.Context(), client: c}
				defer s.abandon()
				if len(args) == 0 && a.inTerminal {
					return a.transactByHand(s, options)
				}
				name := "-"
				if len(args) == 1 {
					name = args[0]
				}
				script, err := a.readScript(name)
				if err != nil {
					return err
				}
				return s.runScript(name, script, options, f.retries)
			})
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&f.snapshot, "snapshot", false, "snapshot isolation instead of serializable")
	flags.BoolVar(&f.readOnly, "read-only", false, "refuse writes; such a transaction never conflicts")
	flags.Var(&f.at, "at", "read-only, at this `EPOCH|TIME`: "+momentForms)
	flags.IntVar(&f.retries, "retries", 0, "run the script again at most `N` times after conflicts")
	addDurability(cmd, &f.durability)
	cmd.AddCommand(a.txnListCommand(), a.txnEndCommand())
	return cmd
}

func (a *app) readScript(name string) (string, error) {
	in := a.in
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return "", err
		}
		defer func() { _ = file.Close() }() // only read
		in = file
	}
	text, err := io.ReadAll(io.LimitReader(in, scriptBytesMax+1))
	if err == nil && len(text) > scriptBytesMax {
		err = fmt.Errorf("%s: longer than the 64 MiB that a script may have", name)
	}
	return string(text), err
}

// attemptBytesMax bounds the output of an attempt that may be repeated. Tests change it.
var attemptBytesMax = 64 << 20

// attemptOutput is the output of an attempt.
type attemptOutput struct{ bytes.Buffer }

// Write implements io.Writer.
func (o *attemptOutput) Write(b []byte) (int, error) {
	if o.Len()+len(b) > attemptBytesMax {
		return 0, fmt.Errorf("the output of the script is longer than the %s that it may have with --retries", size(uint64(attemptBytesMax)))
	}
	return o.Buffer.Write(b)
}

// checkEnd refuses a script that goes on after the end of its transaction, before anything is executed: its beginning would be committed.
func checkEnd(name, script string) error {
	number, ended := 0, false
	for line := range strings.Lines(script) {
		number++
		switch words, err := splitStatement(line); {
		case err == nil && len(words) == 0:
		case ended:
			return usageError{fmt.Errorf("%s:%d: the transaction has ended above; nothing was executed", name, number)}
		default: // an error is told by execute
			ended = len(words) == 1 && (words[0] == "commit" || words[0] == "rollback")
		}
	}
	return nil
}

// runScript runs a script as one transaction, and again after conflicts. While it may run again, its output is buffered until it has
// committed or failed for good, so that the reads of a repeated attempt are not shown.
func (s *statements) runScript(name, script string, options []client.TxnOption, retries int) error {
	if err := checkEnd(name, script); err != nil {
		return err
	}
	s.script = true
	out := s.app.out
	defer func() { s.app.out = out }()
	for retries > 0 {
		var printed attemptOutput
		s.app.out = &printed
		err := s.runOnce(name, script, options)
		if errors.Is(err, client.ErrConflict) {
			retries--
			continue
		}
		_, written := out.Write(printed.Bytes())
		return errors.Join(err, written)
	}
	s.app.out = out
	return s.runOnce(name, script, options)
}

func (s *statements) runOnce(name, script string, options []client.TxnOption) error {
	if err := s.open(options); err != nil {
		return err
	}
	defer s.abandon()
	number := 0
	for line := range strings.Lines(script) {
		number++
		if err := s.execute(line); err != nil {
			return fmt.Errorf("%s:%d: %w", name, number, err)
		}
	}
	if s.tx == nil {
		return nil
	}
	return s.within(func() error { return s.commit(nil) })
}

func (a *app) txnListCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the interactive transactions that are open",
		Example: `  kvctl txn list -o json`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error { return a.listTransactions(cmd, c) })
		},
	}
}

// txnRow is a transaction as JSON shows it.
type txnRow struct {
	ID        uint64 `json:"id"`
	Peer      string `json:"peer"`
	Isolation string `json:"isolation"`
	ReadOnly  bool   `json:"read_only"`
	ReadEpoch uint64 `json:"read_epoch"`
	Age       string `json:"age"`
	Idle      string `json:"idle"`
	Requests  uint64 `json:"requests"`
	Bytes     uint64 `json:"bytes"`
}

func (a *app) listTransactions(cmd *cobra.Command, c *client.Client) error {
	all, err := c.Transactions(cmd.Context())
	if err != nil {
		return err
	}
	rows := make([]txnRow, len(all))
	for i, t := range all {
		rows[i] = txnRow{
			ID: t.GetId(), Peer: t.GetPeer(), Isolation: strings.ToLower(strings.TrimPrefix(t.GetIsolation().String(), "ISOLATION_")),
			ReadOnly: t.GetReadOnly(), ReadEpoch: t.GetReadEpoch(), Requests: t.GetRequests(), Bytes: t.GetBytes(),
			Age: t.GetAge().AsDuration().Round(time.Millisecond).String(), Idle: t.GetIdle().AsDuration().Round(time.Millisecond).String(),
		}
	}
	if printed, err := printRows(a, rows); printed {
		return err
	}
	table := [][]string{{"ID", "PEER", "ISOLATION", "AT", "AGE", "IDLE", "REQUESTS", "BYTES"}}
	for _, r := range rows {
		isolation := r.Isolation
		if r.ReadOnly {
			isolation += ", read-only"
		}
		table = append(table, []string{
			fmt.Sprint(r.ID), r.Peer, isolation, fmt.Sprint(r.ReadEpoch), r.Age, r.Idle, fmt.Sprint(r.Requests), fmt.Sprint(r.Bytes),
		})
	}
	return a.writeTable(table)
}

func (a *app) txnEndCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "end ID",
		Short:   "Roll back an open interactive transaction",
		Example: `  kvctl txn end 12`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := idArg(args[0], "transaction")
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error { return c.EndTransaction(cmd.Context(), id) })
		},
	}
}
