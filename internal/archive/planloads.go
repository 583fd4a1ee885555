package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"time"

	"github.com/epochkv/epochkv/internal/objectstore"
)

// checkLoads finds the bulk loads up to the target, and checks that the archive has all objects with their entries.
func (p *Plan) checkLoads(ctx context.Context) error {
	var objects map[string]int64
	at := p.Base
	for i := range p.files {
		if p.Files[i].Loads > 0 {
			if objects == nil {
				var err error
				if objects, err = p.place.runs(ctx); err != nil {
					return err
				}
			}
			if err := p.checkLoadsOf(ctx, i, objects, at); err != nil {
				return err
			}
		}
		at = p.Files[i].after(at)
	}
	return nil
}

// checkLoadsOf checks the bulk loads of a file, before which the archive is at a point.
func (p *Plan) checkLoadsOf(ctx context.Context, n int, objects map[string]int64, at Point) (err error) {
	r, err := p.place.open(ctx, p.files[n].name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	for {
		rec, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if rec.Epoch <= p.Base.Epoch {
			continue
		}
		before := at
		at = r.after(at, &rec)
		if p.isAfter(rec.Epoch, microseconds(at.Time)) {
			return nil
		}
		if rec.Load {
			if err := p.checkLoad(ctx, &rec, objects, before); err != nil {
				return err
			}
		}
	}
}

// checkLoad checks a bulk load, before which the archive is at a point.
func (p *Plan) checkLoad(ctx context.Context, rec *Record, objects map[string]int64, before Point) error {
	load, err := decodeLoad(rec.Body)
	if err != nil {
		return err
	}
	p.Loads++
	for i := range load.Objects {
		o := &load.Objects[i]
		name := p.place.name(logDir, runName(rec.Epoch, o.SHA256))
		size, found := objects[name]
		if !found || size != o.Bytes { // the list may be late
			whole, err := p.place.has(ctx, name, o.Bytes)
			if err != nil {
				return err
			}
			if !whole {
				reason := fmt.Sprintf("%s with entries of the bulk load at epoch %d is missing, or too short", path.Base(name), rec.Epoch)
				return &MissingError{Target: p.Target, From: before.Epoch + 1, Through: rec.Epoch, Reason: reason, Latest: before}
			}
		}
		p.LoadBytes += o.Bytes
	}
	return nil
}

// has reports whether an object is there and has so many bytes, or more.
func (p *place) has(ctx context.Context, name string, bytes int64) (bool, error) {
	r, err := p.store.Read(ctx, name, bytes, 0)
	if errors.Is(err, objectstore.ErrNotFound) || errors.Is(err, objectstore.ErrShort) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, r.Close()
}

func newer(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// load applies the entries of a bulk load.
func (r *replay) load(ctx context.Context, rec *Record) error {
	load, err := decodeLoad(rec.Body)
	if err != nil {
		return err
	}
	run := newRunReader(&r.plan.place, rec.Epoch, load, func(body []byte) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return r.apply(Record{Epoch: rec.Epoch, Term: rec.Term, Load: true, Body: body})
	})
	return run.read(ctx)
}
