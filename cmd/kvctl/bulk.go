package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/epochkv/epochkv/client"
)

// importBulk loads all files at once: whole or not at all.
func (a *app) importBulk(ctx context.Context, c *client.Client, f *importFlags, names []string) error {
	status, err := c.Status(ctx) // for its limits, and to fail before anything is read if nobody is there
	if err != nil {
		return err
	}
	total, err := totalSize(names)
	if err != nil {
		return err
	}
	load, err := c.BulkLoad(ctx)
	if err != nil {
		return err
	}
	defer load.Close()
	im := &importer{limits: status.GetLimits(), progress: a.newProgress("loaded", total)}
	for _, name := range names {
		if err := im.bulkFile(a, f, name, load); err != nil {
			return err
		}
	}
	loaded, err := load.Commit()
	if err != nil {
		return err
	}
	im.progress.finish()
	return a.written(loaded.Epoch)
}

func (im *importer) bulkFile(a *app, f *importFlags, name string, load *client.BulkLoad) error {
	source, name, done, err := im.open(a, f, name)
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
		if err != nil {
			return fmt.Errorf("%s:%d: %w; nothing was loaded", name, line, err)
		}
		if err := load.Put(r.key, r.value); err != nil {
			return err
		}
		im.progress.add(1, len(r.key)+len(r.value))
	}
}
