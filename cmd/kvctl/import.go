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
	"strings"
	"sync"

	"github.com/spf13/cobra"

	kvpb "epochkv/api/proto/epochkv/v1"
	"epochkv/client"
)

const (
	formatCSV  = "csv"
	formatAuto = "auto"

	batchRecordsDefault = 500
	// batchBytesMax ends a batch early, so that large values do not add up to a message that nobody accepts.
	batchBytesMax = 1 << 20
	// batchesInFlight hides the latency of the server's disk and bounds what is in flight to 16 MiB or so.
	batchesInFlight = 16
	// lineBytesMax is a record of maximal size in which JSON escapes every byte as six.
	lineBytesMax = 6*(valueBytesMax+2048) + 1024
)

func (a *app) importCommand() *cobra.Command {
	var f importFlags
	cmd := &cobra.Command{
		Use:   "import FILE|-...",
		Short: "Put the records of files",
		Long: `Put every record of the files, "-" being standard input, in batches over a pipeline. Records take effect in their order: of
two with the same key the later one wins.

The format is JSON Lines or CSV, as export writes them (see there); by default CSV for files named *.csv. A broken line ends the
import and is named with its file; everything before its batch has then been imported, and nothing from there on.`,
		Example: `  kvctl import users.jsonl
  kvctl import --durability async a.csv b.csv
  zcat dump.jsonl.gz | kvctl import -`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch f.fileFormat {
			case formatAuto, formatJSONL, formatCSV:
			default:
				return usageError{fmt.Errorf("--format %q: must be auto, jsonl or csv", f.fileFormat)}
			}
			if f.batchRecords <= 0 {
				return usageError{fmt.Errorf("--batch %d: must be positive", f.batchRecords)}
			}
			options, err := durabilityOption(f.durability)
			if err != nil {
				return err
			}
			ctx, cancel := a.longRunning(cmd)
			defer cancel()
			return a.withClient(func(c *client.Client) error { return a.importFiles(ctx, c, &f, args, options) })
		},
	}
	addDurability(cmd, &f.durability)
	flags := cmd.Flags()
	flags.StringVar(&f.fileFormat, "format", formatAuto, "file `format`: auto, jsonl or csv")
	flags.IntVar(&f.batchRecords, "batch", batchRecordsDefault, "records per batch, which is applied as a `whole`")
	return cmd
}

type importFlags struct {
	fileFormat   string
	durability   string
	batchRecords int
}

// recordSource reads the records of a file, with the line on which each begins. It ends with io.EOF.
type recordSource interface {
	next() (record, int, error)
}

func (a *app) importFiles(
	ctx context.Context, c *client.Client, f *importFlags, names []string, options []client.WriteOption,
) error {
	status, err := c.Status(ctx) // for its limits, and to fail before anything is read if nobody is there
	if err != nil {
		return err
	}
	total, err := totalSize(names)
	if err != nil {
		return err
	}
	pipeline, err := c.Pipeline(ctx, client.PipelineOptions{InFlight: batchesInFlight})
	if err != nil {
		return err
	}
	im := &importer{
		pipeline: pipeline,
		options:  options,
		limits:   status.GetLimits(),
		records:  f.batchRecords,
		keys:     map[string]struct{}{},
		progress: a.newProgress("imported", total),
	}
	err = im.run(a, f, names)
	if closeErr := pipeline.Close(); err == nil {
		err = closeErr
	}
	if failed := im.failure(); failed != nil {
		err = failed // came first: whatever ended the run after it is its consequence
	}
	im.progress.finish()
	return err
}

// totalSize is the number of bytes in all files, or -1 if that cannot be known. It finds missing files before anything is imported.
func totalSize(names []string) (int64, error) {
	var total int64
	for _, name := range names {
		if name == "-" {
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

// importer turns records into batches on a pipeline.
type importer struct {
	pipeline *client.Pipeline
	options  []client.WriteOption
	limits   *kvpb.Limits
	records  int // in a full batch

	batch client.Batch
	keys  map[string]struct{} // in the batch
	at    span                // of the batch

	mu       sync.Mutex // the pipeline's goroutine reports below
	progress *progress
	failed   error
}

// span is where the records of a batch stand.
type span struct {
	file        string
	first, last int // lines
}

func (im *importer) run(a *app, f *importFlags, names []string) error {
	for _, name := range names {
		if err := im.importFile(a, f, name); err != nil {
			return err
		}
	}
	return nil
}

func (im *importer) importFile(a *app, f *importFlags, name string) error {
	in := a.in
	if name == "-" {
		name = "standard input"
	} else {
		file, err := os.Open(name)
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }() // it was only read
		in = file
	}
	source := newSource(f.fileFormat, name, &countingReader{r: in, advance: im.progress.advance})
	im.at = span{file: name}
	for {
		r, line, err := source.next()
		if errors.Is(err, io.EOF) {
			return im.send()
		}
		if err == nil {
			err = im.checkLimits(&r)
		}
		if err != nil {
			return im.brokenLine(line, err)
		}
		if err := im.add(&r, line); err != nil {
			return err
		}
	}
}

func newSource(format, name string, r io.Reader) recordSource {
	if format == formatCSV || format == formatAuto && strings.EqualFold(filepath.Ext(name), ".csv") {
		return newCSVSource(r)
	}
	return newJSONSource(r)
}

// checkLimits finds a record that the server would refuse while its line is still known.
func (im *importer) checkLimits(r *record) error {
	if n, limit := uint64(len(r.key)), im.limits.GetKeyBytes(); limit > 0 && n > limit {
		return fmt.Errorf("the key has %d bytes; the limit is %d", n, limit)
	}
	if n, limit := uint64(len(r.value)), im.limits.GetValueBytes(); limit > 0 && n > limit {
		return fmt.Errorf("the value has %d bytes; the limit is %d", n, limit)
	}
	return nil
}

// brokenLine drops the batch that the line would have been in, and says so.
func (im *importer) brokenLine(line int, err error) error {
	from := line
	if im.batch.Len() > 0 {
		from = im.at.first
	}
	return fmt.Errorf("%s:%d: %w; nothing from line %d on was imported", im.at.file, line, err, from)
}

// add puts a record into the batch, and sends the batch when it is full. A key that the batch has already starts a new one, since
// no batch may name a key twice and the later record shall win.
func (im *importer) add(r *record, line int) error {
	if _, twice := im.keys[string(r.key)]; twice {
		if err := im.send(); err != nil {
			return err
		}
	}
	if im.batch.Len() == 0 {
		im.at.first = line
	}
	im.batch.Put(r.key, r.value)
	im.keys[string(r.key)] = struct{}{}
	im.at.last = line
	if im.batch.Len() < im.records && im.batch.Bytes() < batchBytesMax {
		return nil
	}
	return im.send()
}

// send sends the batch. It fails if an earlier one has failed.
func (im *importer) send() error {
	if err := im.failure(); err != nil {
		return err
	}
	if im.batch.Len() == 0 {
		return nil
	}
	at, records, size := im.at, im.batch.Len(), im.batch.Bytes()
	done := func(_ client.Epoch, err error) { im.sent(at, records, size, err) }
	if err := im.pipeline.Write(&im.batch, done, im.options...); err != nil {
		return im.batchError(at, err)
	}
	im.batch.Reset()
	clear(im.keys)
	return nil
}

// sent takes the answer to a batch.
func (im *importer) sent(at span, records, size int, err error) {
	im.mu.Lock()
	defer im.mu.Unlock()
	if err == nil {
		im.progress.add(records, size)
	} else if im.failed == nil {
		im.failed = im.batchError(at, err)
	}
}

func (im *importer) batchError(at span, err error) error {
	var e *client.Error
	fate := "was not imported; later lines may have been"
	if errors.As(err, &e) && e.OutcomeUnknown() {
		fate = "may or may not have been imported, and later lines, too"
	}
	return fmt.Errorf("%s, lines %d to %d: %w; that batch %s", at.file, at.first, at.last, err, fate)
}

func (im *importer) failure() error {
	im.mu.Lock()
	defer im.mu.Unlock()
	return im.failed
}

// jsonSource reads JSON Lines. Empty lines are skipped.
type jsonSource struct {
	lines *bufio.Scanner
	line  int
}

func newJSONSource(r io.Reader) *jsonSource {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), lineBytesMax)
	return &jsonSource{lines: lines}
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
		err = fmt.Errorf("the line is longer than the %d bytes that a record can have", lineBytesMax)
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
