package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// When an import is a bulk load.
const (
	bulkAuto   = "auto"
	bulkAlways = "always"
	bulkNever  = "never"
)

const (
	// bulkBytesMin is the size of files below which the two ways differ by parts of a second.
	bulkBytesMin = 64 << 20
	// bulkDiskFactor is how much disk a load needs: for runs that are merged, and for pages beside those that they replace.
	bulkDiskFactor = 4
)

// bulkPays says whether a load is faster than batches: a small one that falls on many pages of a large store is not, because it rewrites all of
// them at once.
func bulkPays(total int64, s *kvpb.StatusResponse) bool {
	stored := s.GetTree().GetLiveBytes() + s.GetSizes().GetMemtableBytes()
	return total >= bulkBytesMin && uint64(total) > stored && s.GetSizes().GetDiskFreeBytes() > bulkDiskFactor*uint64(total)
}

// errBulkExpires ends a load of a key with a deadline.
var errBulkExpires = errors.New("a bulk load takes no keys that expire; import them with --bulk=never")

// errLoadUnknown ends an import. Batches must not follow: the server may still be executing the load, and would overwrite what is written after
// them.
var errLoadUnknown = errors.New("all records may be loaded, now or soon, or none of them; wait until the server runs no bulk load any more, and import again")

// inBatchesAfterAll says whether batches may succeed where a load has failed.
func inBatchesAfterAll(err error) bool {
	var e *client.Error
	return errors.Is(err, errBulkExpires) || errors.As(err, &e) && e.Retryable() && !errors.Is(err, errLoadUnknown)
}

// importBulk loads all files at once: whole or not at all.
func (a *app) importBulk(ctx context.Context, c *client.Client, f *importFlags, names []string, limits *kvpb.Limits, total int64) error {
	load, err := c.BulkLoad(ctx)
	if err != nil {
		return err
	}
	defer load.Close()
	im := &importer{limits: limits, progress: a.newProgress("loaded", total), leased: leasedRecords{skip: f.skipLeased}}
	for _, name := range names {
		if err := im.bulkFile(ctx, a, f, name, load); err != nil {
			return err
		}
	}
	loaded, err := load.Commit()
	if e, failed := errors.AsType[*client.Error](err); failed && e.OutcomeUnknown() {
		return fmt.Errorf("%w; %w", err, errLoadUnknown)
	}
	if err != nil {
		return err
	}
	im.progress.finish()
	im.leased.report(a)
	return a.written(loaded.Epoch)
}

func (im *importer) bulkFile(ctx context.Context, a *app, f *importFlags, name string, load *client.BulkLoad) error {
	source, name, done, err := im.open(ctx, a, f, name)
	if err != nil {
		return err
	}
	defer done()
	for {
		r, line, err := source.next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = im.checkLimits(&r)
		}
		if err == nil && r.expiresAt != 0 {
			err = errBulkExpires
		}
		if err != nil {
			return fmt.Errorf("%s:%d: %w; nothing was loaded", name, line, err)
		}
		if im.leased.leavesOut(&r) {
			continue
		}
		if err := load.Put(r.key, r.value); err != nil {
			return err
		}
		im.progress.add(1, len(r.key)+len(r.value))
	}
}
