package origin

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"

	"epochkv/bench/engines"
	"epochkv/bench/harness"
	"epochkv/bench/workload"
)

// engine reads data that is larger than the engine's cache, after the kernel has been made to forget it.
type engine struct {
	open engines.Open
	scan int // entries of a scan; 0 reads single keys
}

const (
	cacheShare   = 9       // the data is so many times as large as the cache
	cacheMin     = 2 << 20 // below, engines round up
	readsPerKeys = 50      // one read for so many keys: few enough that most pages are met for the first time
)

func (o engine) run(r *harness.Run) (err error) {
	d := workload.NewData(r.Seed, max(r.Size, 50_000), workload.Shape{KeyBytes: 16, ValueBytes: 100})
	e, err := o.open(engines.Options{Dir: r.Dir, CacheBytes: max(int64(d.Count()*116/cacheShare), cacheMin), BufferBytes: 16 << 20})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	if err := errors.Join(d.Load(e), e.Settle()); err != nil {
		return err
	}
	if err := workload.DropPageCache(r.Dir); err != nil {
		return err
	}
	share := max(d.Count()/readsPerKeys/r.Point, 1)
	if o.scan > 0 {
		share = max(share/10, 1)
	}
	err = r.Time(share*r.Point, func() error {
		return workload.Parallel(e, r.Point, func(worker int, s engines.Session) error {
			return o.read(s, d, rand.New(rand.NewPCG(r.Seed, uint64(worker))), share)
		})
	})
	if err != nil {
		return err
	}
	right, want, err := d.ReadBack(e)
	if err != nil {
		return err
	}
	return r.Verified(right, want)
}

func (o engine) read(s engines.Session, d *workload.Data, random *rand.Rand, count int) error {
	buffer, expected := make([]byte, 0, d.KeyBytes+d.ValueBytes), make([]byte, d.ValueBytes)
	for range count {
		i := random.IntN(d.Count())
		if o.scan > 0 {
			if _, err := s.Scan(buffer, d.Key(i), o.scan); err != nil {
				return err
			}
			continue
		}
		got, found, err := s.Get(buffer[:0], d.Key(i))
		if err != nil {
			return err
		}
		if !found || !bytes.Equal(got, d.Value(expected, i)) {
			return fmt.Errorf("key %d: wrong value", i)
		}
	}
	return nil
}
