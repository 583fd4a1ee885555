package peers

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sync/errgroup"

	"github.com/epochkv/epochkv/bench/harness"
)

// server is a running server, loaded, and the load generator's connections to it.
type server struct {
	*process
	kind    kind
	place   place
	stores  []store
	records *records
	order   []int32 // the loaded records by their keys
	runs    int     // so far
}

// shared returns the server of a kind, which is started and loaded when it is asked for the first time. It is stopped.
func shared(r *harness.Run, k kind) (*server, error) {
	binary, err := k.binary(r)
	if err != nil {
		return nil, err
	}
	load := max(r.Size, callersMax) // each caller has a record of its own, in a smoke run too
	return harness.Shared(r, k.name, func(dir string) (*server, error) { return open(r, k, binary, dir, load) })
}

func open(ctx context.Context, k kind, binary, dir string, load int) (_ *server, err error) {
	if dir, err = filepath.Abs(dir); err != nil { // the server's working directory is another
		return nil, err
	}
	s := &server{kind: k, place: place{dir: dir}, records: newRecords(1, load)}
	if s.place.address, err = freeAddress(); err != nil {
		return nil, err
	}
	if s.place.second, err = freeAddress(); err != nil {
		return nil, err
	}
	if s.process, err = start(dir, binary, k.arguments(s.place)...); err != nil {
		return nil, err
	}
	if err = s.prepare(ctx, load); err != nil {
		_ = s.Close() // if it died, err says so
		return nil, fmt.Errorf("%s: %w", k.name, err)
	}
	return s, nil
}

func (s *server) prepare(ctx context.Context, load int) error {
	if err := s.ready(ctx, s.place.address); err != nil {
		return err
	}
	for range s.kind.connections {
		c, err := s.kind.dial(s.place.address)
		if err != nil {
			return err
		}
		s.stores = append(s.stores, c)
	}
	if s.kind.check != nil {
		if err := s.kind.check(ctx, s); err != nil {
			return err
		}
	}
	s.order = s.records.order(load)
	if err := s.load(ctx, load); err != nil {
		return fmt.Errorf("load: %w", err)
	}
	return s.pause()
}

const (
	batchSize = 100 // etcd takes 128 operations in a transaction
	loaders   = 8
)

// load puts the first records.
func (s *server) load(ctx context.Context, count int) error {
	group, ctx := errgroup.WithContext(ctx)
	for l := range loaders {
		group.Go(func() error {
			for from := l * batchSize; from < count; from += loaders * batchSize {
				keys, values := s.batch(from, min(from+batchSize, count), generation(1))
				if err := s.stores[l%len(s.stores)].putAll(ctx, keys, values); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for i := range count {
		s.records.versions[i].Store(generation(1))
	}
	s.runs = 1
	return group.Wait()
}

// batch are the pairs of records [from, to).
func (s *server) batch(from, to int, version uint64) (keys, values [][]byte) {
	for i := from; i < to; i++ {
		keys, values = append(keys, s.records.key(i)), append(values, value(i, version))
	}
	return keys, values
}

// Close ends the server.
func (s *server) Close() (err error) {
	if s.resume() == nil { // closing connections needs a server that runs, but no answer
		for _, c := range s.stores {
			err = errors.Join(err, c.close())
		}
	}
	return errors.Join(err, s.end())
}
