package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

const (
	formatCSV  = "csv"
	formatEtcd = "etcd-snapshot"
	formatAuto = "auto"

	batchRecordsDefault = 500
	// batchBytesMax ends a batch early, so that large values do not add up to a message that is too large for the server.
	batchBytesMax = 1 << 20
)

// lineBytesMax is the length of a record of maximal size in which JSON escapes every byte as six.
func lineBytesMax(limits *kvpb.Limits) int {
	const keyBytesMax = 16 << 10 // a quarter of the largest page
	return 6*(valueBytesMax(limits)+keyBytesMax) + 1024
}

func (a *app) importCommand() *cobra.Command {
	var f importFlags
	cmd := &cobra.Command{
		Use:   "import FILE|-|redis://HOST:PORT/DATABASE...",
		Short: "Put the records of files, of a snapshot of etcd or of a Redis into the store",
		Long: `Put every record of the files, "-" being standard input, in batches over a pipeline. Records take effect in their order: of
two with the same key the later one wins. An overloaded or restarting server does not end the import: it repeats what was not
executed, each batch at most once, and gives up when nothing gets through for 30 seconds.

Keys get the deadlines that the files have (expires_at_ms); one that has passed means that the key is deleted at once. A bulk load takes no
deadlines: use --bulk=never; --bulk=auto changes to batches by itself. Leases (lease_id) are not imported: their keys are put without a
lease, which is reported at the end, or left out with --skip-leased.

The format is JSON Lines or CSV, as export writes them (see there); by default CSV for files named *.csv. A broken line ends the
import and is named with its file; everything before its batch has then been imported, and nothing from there on.

--format etcd-snapshot reads what "etcdctl snapshot save" wrote: all keys with their newest values, those of leases as above. It keeps all keys in
memory, as etcd does, and refuses a file whose checksum is missing or differs. redis://HOST:PORT/DATABASE (rediss:// for TLS) reads the strings of
a running Redis, or Valkey, with SCAN, and their deadlines; load an RDB file into one to import it. Keys that change meanwhile may be imported with
their old or their new value: stop the writers first. A Redis that is restarted or replaced meanwhile ends the import, because SCAN would leave keys
out. A key of another type ends the import, or is left out and counted with --skip-unsupported.
The password may be in the address, or in the variable REDISCLI_AUTH.

An import uses batches or a bulk load; --bulk chooses. With batches, as above, acknowledged records remain if the import ends early. A bulk
load bypasses the server's log: all records become visible together after the last one was read, or none does. The server sorts them in
temporary files, and runs one bulk load at a time. --bulk=auto, the default, uses a bulk load where that is faster: for files (not standard
input) of 64 MiB or more that are larger than the store, if the server's disk has room for four times their size, and without --batch and
--durability. The import prints its choice before it begins, and changes to batches if the server cancels the bulk load. If the answer to its end is
lost, all records may be loaded, or none: the import says so and ends. --bulk (or
--bulk=always) forces a bulk load, and --bulk=never forces batches.

1,000,000 records of 115 bytes, with two processors for kvctl and server together: into an empty store a load took 0.6 s in the order of the
keys and 0.9 s in random order, batches 1.1 s and 2.1 s; over 1,000,000 records, in random order, 1.8 s and 4.1 s. 100,000 records that fell
on all pages of such a store took 0.44 s in bulk and 0.18 s in batches.`,
		Example: `  kvctl import users.jsonl
  kvctl import --durability async a.csv b.csv
  kvctl import --bulk dump.jsonl
  zcat dump.jsonl.gz | kvctl import -
  kvctl import --format etcd-snapshot backup.db
  kvctl import redis://10.0.0.7:6379/0`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch f.fileFormat {
			case formatAuto, formatJSONL, formatCSV, formatEtcd:
			default:
				return usageError{fmt.Errorf("--format %q: must be auto, jsonl, csv or etcd-snapshot", f.fileFormat)}
			}
			if f.fileFormat == formatEtcd && slices.Contains(args, "-") {
				return usageError{errors.New("--format etcd-snapshot: a snapshot is read from a file, not from standard input")}
			}
			if f.batchRecords <= 0 {
				return usageError{fmt.Errorf("--batch %d: must be positive", f.batchRecords)}
			}
			switch f.bulk {
			case bulkAuto, bulkAlways, bulkNever:
			default:
				return usageError{fmt.Errorf("--bulk=%s: must be auto, always or never", f.bulk)}
			}
			if cmd.Flags().Changed("batch") || cmd.Flags().Changed("durability") {
				if f.bulk == bulkAlways {
					return usageError{errors.New("--batch and --durability apply to batches only: use them with --bulk=never")}
				}
				f.bulk = bulkNever
			}
			options, err := durabilityOption(f.durability)
			if err != nil {
				return err
			}
			ctx, cancel := a.longRunning(cmd)
			defer cancel()
			return a.withClient(func(c *client.Client) error {
				return a.importFiles(ctx, c, &f, args, options)
			})
		},
	}
	addDurability(cmd, &f.durability)
	flags := cmd.Flags()
	flags.StringVar(&f.fileFormat, "format", formatAuto, "`FORMAT` of the file: auto, jsonl, csv or etcd-snapshot")
	flags.IntVar(&f.batchRecords, "batch", batchRecordsDefault, "apply `N` records as one batch")
	flags.StringVar(&f.bulk, "bulk", bulkAuto, "`WHEN` to load everything at once, or nothing: auto, always or never")
	flags.Lookup("bulk").NoOptDefVal = bulkAlways
	flags.BoolVar(&f.skipLeased, "skip-leased", false, "leave out keys that belonged to a lease")
	flags.BoolVar(&f.skipUnsupported, "skip-unsupported", false, "leave out keys of Redis that are not strings, and count them")
	return cmd
}

type importFlags struct {
	fileFormat   string
	durability   string
	batchRecords int
	bulk         string

	skipLeased, skipUnsupported bool
}

// recordSource reads the records of a file, with the line on which each begins. It ends with io.EOF.
type recordSource interface {
	next() (record, int, error)
}

// importFiles imports in the way that the flags, the files and the store suggest.
func (a *app) importFiles(
	ctx context.Context, c *client.Client, f *importFlags, names []string, options []client.WriteOption,
) error {
	status, err := c.Status(ctx) // for its limits, and to fail before anything is read if no server answers
	if err != nil {
		return err
	}
	total, err := totalSize(names)
	if err != nil {
		return err
	}
	if f.bulk == bulkAlways {
		return a.importBulk(ctx, c, f, names, status.GetLimits(), total)
	}
	if f.bulk == bulkAuto && bulkPays(total, status) {
		_, _ = fmt.Fprintf(a.err, "loading in bulk; --bulk=never imports in batches\n")
		if err = a.importBulk(ctx, c, f, names, status.GetLimits(), total); err == nil || !inBatchesAfterAll(err) {
			return err
		}
		_, _ = fmt.Fprintf(a.err, "the load was given up: %v; importing in batches\n", err)
	}
	return a.importBatches(ctx, c, f, names, options, status.GetLimits(), total)
}

func (a *app) importBatches(
	ctx context.Context, c *client.Client, f *importFlags, names []string, options []client.WriteOption, limits *kvpb.Limits, total int64,
) error {
	sender, err := newBatchSender(ctx, c, options)
	if err != nil {
		return err
	}
	im := &importer{
		sender:   sender,
		limits:   limits,
		records:  f.batchRecords,
		keys:     map[string]struct{}{},
		batch:    &pendingBatch{},
		progress: a.newProgress("imported", total),
		leased:   leasedRecords{skip: f.skipLeased},
	}
	err = im.run(ctx, a, f, names)
	if failed := sender.close(); failed != nil {
		err = failed // a batch failed before a line did
	}
	im.progress.add(sender.records, sender.bytes)
	im.progress.finish()
	im.leased.report(a)
	return err
}

// totalSize is the number of bytes in all files, or -1 if that cannot be known. It finds missing files before anything is imported.
func totalSize(names []string) (int64, error) {
	var total int64
	for _, name := range names {
		if name == "-" || isRedis(name) {
			return -1, nil
		}
		info, err := os.Stat(name)
		if err != nil {
			return 0, err
		}
		if total += info.Size(); !info.Mode().IsRegular() {
			return -1, nil
		}
	}
	return total, nil
}

func newSource(format, name string, lineMax int, r io.Reader) recordSource {
	if format == formatCSV || format == formatAuto && strings.EqualFold(filepath.Ext(name), ".csv") {
		return newCSVSource(r, lineMax)
	}
	return newJSONSource(r, lineMax)
}

// jsonSource reads JSON Lines. Empty lines are skipped.
type jsonSource struct {
	lines *bufio.Scanner
	max   int
	line  int
}

func newJSONSource(r io.Reader, lineMax int) *jsonSource {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), lineMax)
	return &jsonSource{lines: lines, max: lineMax}
}

func (s *jsonSource) next() (record, int, error) {
	for s.lines.Scan() {
		s.line++
		line := bytes.TrimSpace(s.lines.Bytes())
		if len(line) == 0 {
			continue
		}
		r, err := parseJSONLine(line)
		return r, s.line, err
	}
	err := s.lines.Err()
	switch {
	case err == nil:
		return record{}, s.line, io.EOF
	case errors.Is(err, bufio.ErrTooLong):
		err = fmt.Errorf("the line is longer than the %d bytes that a record can have", s.max)
	}
	return record{}, s.line + 1, err
}

// countingReader tells how much has been read.
type countingReader struct {
	r       io.Reader
	advance func(bytes int)
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.advance(n)
	return n, err
}
