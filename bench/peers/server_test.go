package peers

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/client"
)

// mustOpen starts a server of the kind with some records, or skips the test where there is none.
func mustOpen(t *testing.T, k kind, load int) *server {
	t.Helper()
	binary, err := k.binary(&harness.Run{Context: t.Context(), Dir: filepath.Join(programs, "run"), Smoke: true})
	if errors.Is(err, harness.ErrAbsent) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir()) // scratch is named from where the load generator was started
	if err := os.Mkdir("scratch", 0o755); err != nil {
		t.Fatal(err)
	}
	s, err := open(t.Context(), k, binary, "scratch", load)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		gone(t, s.pid)
	})
	if err := s.resume(); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestEveryServerDoesWhatTheLoadsExpect(t *testing.T) {
	for _, k := range writers(true) {
		t.Run(k.name, func(t *testing.T) {
			s := mustOpen(t, k, 300)
			if k.hollow() {
				wantStream(t, s, s.stores[0])
				return
			}
			ctx, c := t.Context(), s.stores[0]
			key, before, after := s.records.key(7), value(7, generation(1)), value(7, generation(1)+1)
			wantValue(t, c, key, before)
			wantValue(t, c, []byte("no such key 1234"), nil)
			if swapped, err := c.swap(ctx, key, after, after); swapped || err != nil {
				t.Errorf("swap of what is not there: %v, %v", swapped, err)
			}
			if swapped, err := c.swap(ctx, key, before, after); !swapped || err != nil {
				t.Errorf("swap: %v, %v", swapped, err)
			}
			wantValue(t, c, key, after)
			if err := c.put(ctx, key, before); err != nil {
				t.Error(err)
			}
			wantValue(t, c, key, before)
			wantOrder(t, s, c)
			wantStream(t, s, c)
		})
	}
}

func wantValue(t *testing.T, c store, key, want []byte) {
	t.Helper()
	got, err := c.get(t.Context(), key)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("got %x, %v; want %x", got, err, want)
	}
}

// wantOrder reads ranges, which must have what was inserted.
func wantOrder(t *testing.T, s *server, c store) {
	t.Helper()
	i, err := s.records.claim()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.insert(t.Context(), s.records.key(i), value(i, 1)); err != nil {
		t.Fatal(err)
	}
	want := s.records.order(i + 1)
	key := func(rank int) []byte { return s.records.key(int(want[rank])) }
	keys, values, err := c.scan(t.Context(), key(10), key(50+rangeSize), rangeSize)
	if err != nil || len(keys) != rangeSize || len(values) != rangeSize {
		t.Fatalf("range: %d keys, %d values, %v", len(keys), len(values), err)
	}
	for j := range keys {
		if _, err := check(s.records.number(keys[j]), values[j], 1); err != nil || !bytes.Equal(keys[j], key(10+j)) {
			t.Fatalf("entry %d: %x, want %x; %v", j, keys[j], key(10+j), err)
		}
	}
	if keys, _, err = c.scan(t.Context(), key(10), key(12), rangeSize); err != nil || len(keys) != 2 {
		t.Errorf("range of two: %d keys, %v", len(keys), err)
	}
	if keys, _, err = c.scan(t.Context(), key(len(want)-2), nil, rangeSize); err != nil || len(keys) != 2 {
		t.Errorf("range at the end: %d keys, %v; want 2", len(keys), err)
	}
}

// wantStream streams puts and then gets of them.
func wantStream(t *testing.T, s *server, c store) {
	t.Helper()
	const requests, depth = 200, 16
	for _, put := range []bool{true, false} {
		var mu sync.Mutex
		made, answered := 0, 0
		next := func(r *request) bool {
			mu.Lock()
			defer mu.Unlock()
			if made == requests {
				return false
			}
			r.key, r.value, r.tag.record = s.records.key(made), nil, made
			if put {
				r.value = value(made, generation(9))
			}
			made++
			return true
		}
		err := c.stream(t.Context(), depth, next, func(r *request, got []byte) error {
			mu.Lock()
			defer mu.Unlock()
			answered++
			if put || s.kind.hollow() {
				return nil
			}
			_, err := check(r.tag.record, got, generation(9))
			return err
		})
		if err != nil || answered != requests {
			t.Errorf("put %v: %d of %d answered, %v", put, answered, requests, err)
		}
		refused := errors.New("refused")
		made = 0
		if err := c.stream(t.Context(), depth, next, func(*request, []byte) error { return refused }); !errors.Is(err, refused) {
			t.Errorf("a stream whose answers are wrong ended with %v", err)
		}
	}
}

// faulty is a store in memory with one fault.
type faulty struct {
	mu     sync.Mutex
	values map[string][]byte
	calls  int

	losesPuts, staleReads, swapsTwice bool
}

func (f *faulty) get(_ context.Context, key []byte) ([]byte, error) {
	f.mu.Lock()
	v := f.values[string(key)]
	f.calls++
	if f.staleReads && f.calls%100 == 0 {
		v = value(new(records).number(key), 1)
	}
	f.mu.Unlock()
	runtime.Gosched() // so that others come between a read and what follows
	return v, nil
}

func (f *faulty) put(_ context.Context, key, value []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.calls++; !f.losesPuts || f.calls%10 != 0 {
		f.values[string(key)] = value
	}
	return nil
}

func (f *faulty) swap(_ context.Context, key, old, value []byte) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.swapsTwice && !bytes.Equal(f.values[string(key)], old) {
		return false, nil
	}
	f.values[string(key)] = value
	return true, nil
}

func (f *faulty) putAll(ctx context.Context, keys, values [][]byte) error {
	for i := range keys {
		if err := f.put(ctx, keys[i], values[i]); err != nil {
			return err
		}
	}
	return nil
}

func (f *faulty) insert(ctx context.Context, key, value []byte) error { return f.put(ctx, key, value) }
func (*faulty) close() error                                          { return nil }

func (*faulty) scan(context.Context, []byte, []byte, int) (keys, values [][]byte, err error) {
	return nil, nil, errors.New("no ranges")
}

func (f *faulty) stream(ctx context.Context, depth int, next func(*request) bool, done func(*request, []byte) error) error {
	return concurrently(ctx, f, depth, next, done)
}

// judge runs a load against a store with 200 records and returns what the checks say.
func judge(t *testing.T, f *faulty, do work) error {
	t.Helper()
	const load = 200
	f.values = map[string][]byte{}
	s := &server{kind: kind{name: "faulty", durability: durable}, stores: []store{f}, records: newRecords(1, load)}
	s.order = s.records.order(load)
	losesPuts := f.losesPuts
	f.losesPuts = false
	if err := s.load(t.Context(), load); err != nil {
		t.Fatal(err)
	}
	f.losesPuts = losesPuts
	callers := s.callers(1, 8)
	run := func(section func() (int, error)) error { _, err := section(); return err }
	if err := closed(t.Context(), callers, do, 20*time.Millisecond, run); err != nil {
		return err
	}
	return s.verify(t.Context(), &harness.Run{Context: t.Context()}, callers)
}

func TestLostStaleAndDoubledWritesFailTheRun(t *testing.T) {
	for name, c := range map[string]struct {
		store *faulty
		do    work
		wrong bool
	}{
		"updates":            {&faulty{}, ycsbA.do, false},
		"inserts":            {&faulty{}, ycsbD.do, false},
		"swaps":              {&faulty{}, ycsbF.do, false},
		"own swaps":          {&faulty{}, swapOwn, false},
		"batches":            {&faulty{}, putBatch, false},
		"lost puts":          {&faulty{losesPuts: true}, putOwn, true},
		"lost batches":       {&faulty{losesPuts: true}, putBatch, true},
		"lost inserts":       {&faulty{losesPuts: true}, ycsbD.do, true},
		"stale reads":        {&faulty{staleReads: true}, ycsbB.do, true},
		"swaps that overrun": {&faulty{swapsTwice: true}, ycsbF.do, true},
	} {
		if err := judge(t, c.store, c.do); (err != nil) != c.wrong {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAServerThatDoesNotSyncIsFoundOut(t *testing.T) {
	async := epochKVKind()
	async.dial = dialEpochKV(client.Async())
	everySecond := redisKind("everysec", durable, false)
	for _, liar := range []kind{async, everySecond} {
		if _, err := liar.binary(&harness.Run{Context: t.Context(), Dir: filepath.Join(programs, "run")}); errors.Is(err, harness.ErrAbsent) {
			continue
		}
		s := closedLoop("liar", "Says that it syncs.", "puts", "", []kind{liar}, putOwn)
		s.Axis.Points, s.Size = []int{1}, 1000
		_, err := harness.Execute(t.Context(), []harness.Scenario{s}, harness.Options{Scratch: t.TempDir(), Budget: time.Second, Log: t.Logf})
		if err == nil || !strings.Contains(err.Error(), "proof: "+liar.witness.name) {
			t.Errorf("%s: got %v, want the missing syncs", liar.name, err)
		}
	}
}

func TestARedisThatSyncsOtherwiseIsFoundOut(t *testing.T) {
	liar := redisKind("everysec", durable, false)
	liar.check = redisSyncsAs("always")
	binary, err := redisBinary(nil)
	if err != nil {
		t.Skip(err)
	}
	if s, err := open(t.Context(), liar, binary, t.TempDir(), 100); err == nil {
		t.Error("it was believed")
		_ = s.Close()
	} else if !strings.Contains(err.Error(), "appendfsync") {
		t.Error(err)
	}
}

func TestMixesAddUp(t *testing.T) {
	for _, m := range []mix{ycsbA, ycsbB, ycsbC, ycsbD, ycsbE, ycsbF} {
		if sum := m.read + m.update + m.insert + m.scan + m.modify; sum != 100 {
			t.Errorf("workload %s: %d in a hundred", m.name, sum)
		}
	}
}

func TestScenariosOfAStageAreConsecutive(t *testing.T) {
	seen, last := map[string]bool{}, ""
	for _, s := range Scenarios() {
		if s.Stage != last && seen[s.Stage] {
			t.Errorf("%s: stage %s comes back, and its servers would be started anew", s.Name, s.Stage)
		}
		seen[s.Stage], last = true, s.Stage
	}
}
