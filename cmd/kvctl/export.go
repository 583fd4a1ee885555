package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

// recordSink writes records to a file of some format.
type recordSink interface {
	write(r *record) error
	close() error
}

type exportFlags struct {
	fileFormat string
	base64     bool
	epochs     bool
	metadata   bool
	file       string
	at         uint64
	keyRange   rangeFlags
}

func (a *app) exportCommand() *cobra.Command {
	var f exportFlags
	cmd := &cobra.Command{
		Use:   "export [PREFIX]",
		Short: "Write entries to a file that import understands",
		Long: `Write all entries, or those of a range, in key order, all read at one epoch. It goes to standard output, or with --file to a
file that appears under its name only once it is complete. That replaces files only: a pipe or a device takes the output of >.

JSON Lines is one {"key":"...","value":"..."} per line; bytes that are not UTF-8 are base64 under key_base64 or
value_base64. CSV has a header and two columns; as text it refuses what CSV cannot carry (bytes that are not UTF-8, carriage
returns), with --base64 it carries everything.

A key with a deadline has expires_at_ms, in milliseconds since 1970, and one that belongs to a lease lease_id. CSV has columns for them
with --metadata, and is refused without for such keys. Leases and locks are not exported.`,
		Example: `  kvctl export > everything.jsonl
  kvctl export user/ --file users.jsonl
  kvctl export --format csv --base64 --file everything.csv
  kvctl export --at 41 --epochs`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 && f.keyRange.given() {
				return errors.New("export: give either PREFIX or a range, not both")
			}
			return cobra.MaximumNArgs(1)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				f.keyRange.prefix = args[0]
			}
			if f.fileFormat != formatJSONL && f.fileFormat != formatCSV {
				return usageError{fmt.Errorf("--format %q: must be jsonl or csv", f.fileFormat)}
			}
			if cmd.Flags().Changed("at") && f.at == 0 {
				return usageError{fmt.Errorf("--at: %w", errEpochZero)}
			}
			return a.withClient(func(c *client.Client) error { return a.export(cmd, c, &f) })
		},
	}
	f.keyRange.add(cmd)
	flags := cmd.Flags()
	flags.StringVar(&f.fileFormat, "format", formatJSONL, "`FORMAT` of the file: jsonl or csv")
	flags.BoolVar(&f.base64, "base64", false, "CSV: keys and values in base64")
	flags.BoolVar(&f.metadata, "metadata", false, "CSV: add the columns expires_at_ms and lease_id")
	flags.BoolVar(&f.epochs, "epochs", false, "JSON lines: add the epoch that wrote each value")
	flags.StringVar(&f.file, "file", "", "write to this `FILE` instead of standard output")
	flags.Uint64Var(&f.at, "at", 0, "read at this `EPOCH` instead of the newest")
	return cmd
}

func (a *app) export(cmd *cobra.Command, c *client.Client, f *exportFlags) error {
	if f.file == "" {
		return a.exportTo(cmd, c, f, a.out)
	}
	// The file gets its name when it is complete: a name that is there can be trusted.
	name, err := fileToReplace(f.file)
	if errors.Is(err, errNotRegular) {
		return fmt.Errorf("--file: %w; export without --file, and let the shell write to it with >", err)
	}
	if err != nil {
		return err
	}
	partial := fmt.Sprintf("%s.%016x.partial", name, rand.Uint64()) // its own: another export to the same name may be running
	file, err := createLike(partial, name)
	if err != nil {
		return err
	}
	err = errors.Join(a.exportTo(cmd, c, f, file), file.Sync(), file.Close())
	if err == nil {
		err = os.Rename(partial, name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(partial))
	}
	return nil
}

// createLike creates a file with the mode of the one whose place it is to take, if there is one: that may be private.
func createLike(name, model string) (*os.File, error) {
	info, missing := os.Stat(model)
	mode := fs.FileMode(0o666)
	if missing == nil {
		mode = info.Mode().Perm()
	}
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil || missing != nil {
		return file, err
	}
	if err := file.Chmod(mode); err != nil { // also what the umask has taken
		return nil, errors.Join(err, file.Close(), os.Remove(name))
	}
	return file, nil
}

func (a *app) exportTo(cmd *cobra.Command, c *client.Client, f *exportFlags, out io.Writer) error {
	keyRange, err := f.keyRange.keyRange(a)
	if err != nil {
		return err
	}
	ctx, cancel := a.longRunning(cmd)
	defer cancel()
	buffered := bufio.NewWriterSize(out, 256<<10)
	sink := f.sink(a, buffered)
	progress := a.newProgress("exported", -1)
	for e, err := range c.Scan(ctx, keyRange, client.ScanOptions{At: client.Epoch(f.at)}) {
		if err != nil {
			return err
		}
		r := record{key: e.Key, value: e.Value, expiresAt: milliseconds(e.ExpiresAt), lease: e.Lease}
		if f.epochs {
			r.epoch = e.Epoch
		}
		if err := sink.write(&r); err != nil {
			return err
		}
		progress.add(1, len(r.key)+len(r.value))
		progress.advance(len(r.key) + len(r.value))
	}
	if err := errors.Join(sink.close(), buffered.Flush()); err != nil {
		return err
	}
	progress.finish()
	return nil
}

func (f *exportFlags) sink(a *app, w io.Writer) recordSink {
	if f.fileFormat == formatCSV {
		return newCSVSink(w, f.base64, f.metadata)
	}
	return &jsonSink{w: w, hex: a.hex}
}

// jsonSink writes records as JSON Lines.
type jsonSink struct {
	w    io.Writer
	hex  bool
	line []byte
}

func (s *jsonSink) write(r *record) error {
	s.line = append(r.appendJSON(s.line[:0], s.hex), '\n')
	_, err := s.w.Write(s.line)
	return err
}

func (s *jsonSink) close() error { return nil }
