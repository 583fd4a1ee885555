package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// importer turns records into batches.
type importer struct {
	sender   *batchSender
	limits   *kvpb.Limits
	records  int // in a full batch
	progress *progress
	leased   leasedRecords

	batch *pendingBatch
	keys  map[string]struct{} // in the batch
	file  string              // being read
}

func (im *importer) run(ctx context.Context, a *app, f *importFlags, names []string) error {
	for _, name := range names {
		if err := im.importFile(ctx, a, f, name); err != nil {
			return err
		}
	}
	return nil
}

// open opens a file, a database of Redis, or standard input, and says how to call it. Its records are parsed ahead.
func (im *importer) open(
	ctx context.Context, a *app, f *importFlags, name string,
) (source recordSource, called string, done func(), err error) {
	source, called, closeFile, err := im.openSource(ctx, a, f, name)
	if err != nil {
		return nil, "", nil, err
	}
	records := newReadAhead(source)
	return records, called, func() { records.stop(); closeFile() }, nil
}

func (im *importer) openSource(
	ctx context.Context, a *app, f *importFlags, name string,
) (source recordSource, called string, closeFile func(), err error) {
	closeFile = func() {}
	switch {
	case isRedis(name):
		source, called, err = openRedis(ctx, name, f.skipUnsupported, a.err)
		return source, called, closeFile, err
	case f.fileFormat == formatEtcd:
		source, err = openEtcdSnapshot(name, im.progress.advance)
		return source, name, closeFile, err
	}
	in := a.in
	if name == "-" {
		name = "standard input"
	} else {
		file, err := os.Open(name)
		if err != nil {
			return nil, "", nil, err
		}
		in, closeFile = file, func() { _ = file.Close() } // it was only read
	}
	source = newSource(f.fileFormat, name, lineBytesMax(im.limits), &countingReader{r: in, advance: im.progress.advance})
	return source, name, closeFile, nil
}

func (im *importer) importFile(ctx context.Context, a *app, f *importFlags, name string) error {
	source, name, done, err := im.open(ctx, a, f, name)
	if err != nil {
		return err
	}
	defer done()
	im.file = name
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
		if im.leased.leavesOut(&r) {
			continue
		}
		if err := im.add(&r, line); err != nil {
			return err
		}
	}
}

// checkLimits finds a record that the server would refuse while its line is still known.
func (im *importer) checkLimits(r *record) error {
	if len(r.key) == 0 { // Redis allows it
		return errors.New("the key is empty")
	}
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
	if im.batch.count > 0 {
		from = im.batch.first
	}
	return fmt.Errorf("%s:%d: %w; nothing from line %d on was imported", im.file, line, err, from)
}

// add puts a record into the batch, and sends the batch when it is full. A key that the batch has already starts a new one, since
// no batch may name a key twice and the later record shall win.
func (im *importer) add(r *record, line int) error {
	if _, twice := im.keys[string(r.key)]; twice {
		if err := im.send(); err != nil {
			return err
		}
	}
	if im.batch.count == 0 {
		im.batch.file, im.batch.first = im.file, line
	}
	im.batch.add(r)
	im.keys[string(r.key)] = struct{}{}
	im.batch.last = line
	if im.batch.count < im.records && im.batch.bytes < batchBytesMax {
		return nil
	}
	return im.send()
}

func (im *importer) send() error {
	if im.batch.count == 0 {
		return nil
	}
	batch := im.batch
	im.batch = &pendingBatch{}
	clear(im.keys)
	return im.sender.send(batch)
}

// leasedRecords counts the records of keys that belonged to a lease. A file has no leases, so the keys are imported without, or
// left out.
type leasedRecords struct {
	skip  bool
	count uint64
}

// leavesOut counts a record, and reports whether it is left out.
func (l *leasedRecords) leavesOut(r *record) bool {
	if r.lease == 0 {
		return false
	}
	l.count++
	return l.skip
}

func (l *leasedRecords) report(a *app) {
	switch {
	case l.count == 0:
	case l.skip:
		_, _ = fmt.Fprintf(a.err, "%d keys belonged to leases and were left out\n", l.count)
	default:
		_, _ = fmt.Fprintf(a.err, "%d keys belonged to leases: they were imported without, so no end of a lease deletes them; --skip-leased leaves such keys out\n", l.count)
	}
}
