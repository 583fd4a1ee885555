package growth

import (
	"errors"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/lmdb"
)

// lmdbInserts is inserts with LMDB, whose process makes keys of its own.
type lmdbInserts struct {
	valueBytes int
	gets       bool // time reads of them instead
}

func (o lmdbInserts) byWriters(r *harness.Run) error { return o.run(r, r.Point) }

func (o lmdbInserts) byValue(r *harness.Run) error {
	o.valueBytes = r.Point
	return o.run(r, 1)
}

func (o lmdbInserts) run(r *harness.Run, writers int) (err error) {
	p, err := lmdb.Start(r.Dir, 0, o.valueBytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	share := max(operations(r.Size, o.valueBytes)/writers, 1)
	var inserted, read int
	if o.gets {
		if inserted, err = p.Do(lmdb.Insert, 1, share); err == nil {
			read, err = p.Time(r, lmdb.Get, 1, inserted)
		}
	} else if inserted, err = p.Time(r, lmdb.Insert, writers, share); err == nil {
		read, err = p.Do(lmdb.Get, 1, inserted)
	}
	if err != nil {
		return err
	}
	return r.Verified(read, share*writers) // the process compares each value that it gets by key
}

// lmdbHeld is an arm of LMDB that does kind beside r.Point held states.
func lmdbHeld(name, kind string) harness.Arm {
	return harness.Arm{Name: "lmdb in C, " + name, Run: func(r *harness.Run) (err error) {
		p, err := lmdb.Start(r.Dir, snapshotKeys, 8)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, p.Close()) }()
		if held, err := p.Do(lmdb.Hold, 1, r.Point); err != nil || held != r.Point {
			return errors.Join(err, r.Verified(held, r.Point))
		}
		if _, err := p.Time(r, kind, 1, r.Size); err != nil {
			return err
		}
		right, err := p.Do(lmdb.Check, 1, r.Point)
		if err != nil {
			return err
		}
		return r.Verified(right, r.Point)
	}}
}
