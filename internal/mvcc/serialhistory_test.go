package mvcc

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

var historyTime = flag.Duration("history.time", 1500*time.Millisecond, "duration of the test that replays what was committed in the order of epochs")

// historyStep is one commit: what it changes, given all that was committed before it, and an error
// if that is not what it has seen. With read it is a snapshot: it changes nothing, and has seen
// what all epochs up to its own had left.
type historyStep struct {
	epoch keys.Epoch
	what  string
	read  bool
	apply func(state *historyState) error
}

// historyState is what all commits up to an epoch have left, and when each key was changed last.
type historyState struct {
	epoch   keys.Epoch
	numbers map[string]uint64
	changed map[string]keys.Epoch
}

func (s *historyState) set(key string, n uint64) { s.numbers[key], s.changed[key] = n, s.epoch }

func (s *historyState) remove(key string) {
	delete(s.numbers, key)
	s.changed[key] = s.epoch
}

// unchangedSince reports whether no key in [lower, upper) was changed after an epoch.
func (s *historyState) unchangedSince(lower, upper string, since keys.Epoch) bool {
	for k, e := range s.changed {
		if k >= lower && k < upper && e > since {
			return false
		}
	}
	return true
}

func historyKey(i int) string { return fmt.Sprintf("h%02d", i) }

// historyValue is a number in a value of any size: most are small, a few fill a segment by half.
func historyValue(random *rand.Rand, n uint64) []byte {
	size := random.IntN(400)
	switch random.IntN(60) {
	case 0:
		size = 40_000 // a record of more than half of a segment
	case 1, 2, 3:
		size = 3_000
	}
	return binary.BigEndian.AppendUint64(make([]byte, 0, 8+size), n)[:8+size]
}

func historyNumber(v []byte) uint64 { return binary.BigEndian.Uint64(v) }

func sumOf(state map[string]uint64, lower, upper string) (sum uint64, n int) {
	for k, v := range state {
		if k >= lower && k < upper {
			sum, n = sum+v, n+1
		}
	}
	return sum, n
}

// TestCommitsHappenInTheOrderOfTheirEpochs: transactions that read ranges and keys and write what
// they have read elsewhere, conditional puts, invocations, range deletes, conditions on ranges,
// snapshots and bulk loads, all of them on few keys, with segments that rotate all the time and
// contexts that end at any moment. Everything that was told to have happened happened at its epoch,
// having seen what all smaller epochs had left; and what was told not to have happened did not.
func TestCommitsHappenInTheOrderOfTheirEpochs(t *testing.T) {
	t.Run("rotations", func(t *testing.T) {
		o := tiny(vfs.NewMem())
		o.Storage.PageSize, o.Storage.CacheBytes = 512, 16<<10 // so that pages are evicted and used again all the time
		testHistory(t, o, *historyTime/2, 5*time.Millisecond)
	})
	t.Run("long chains", func(t *testing.T) {
		o := tiny(vfs.NewMem())
		o.Storage.MemtableBytes, o.Storage.SegmentBytes, o.Storage.CheckpointBytes = 16<<20, 16<<20, 16<<20
		o.Retention = 5 * time.Millisecond
		testHistory(t, o, *historyTime/2, 100*time.Millisecond)
	})
}

// testHistory lets bulk loads and checkpoints come at intervals of up to about pause.
func testHistory(t *testing.T, o Options, duration, pause time.Duration) {
	const all, writers = 12, 6
	seed := testseed.Base(t)
	s := mustOpen(t, o)
	var mu sync.Mutex
	var history []historyStep
	add := func(epoch keys.Epoch, what string, apply func(*historyState) error) {
		mu.Lock()
		history = append(history, historyStep{epoch, what, false, apply})
		mu.Unlock()
	}
	read := func(at keys.Epoch, check func(*historyState) error) {
		mu.Lock()
		history = append(history, historyStep{at, "snapshot", true, check})
		mu.Unlock()
	}
	var conflicts, ended, number atomic.Uint64
	failed := func(err error) {
		switch {
		case errors.As(err, new(*ConflictError)), errors.As(err, new(*PreconditionError)):
			conflicts.Add(1)
		case errors.Is(err, context.DeadlineExceeded):
			ended.Add(1)
		case errors.Is(err, ErrBulkLoadBusy):
		default:
			t.Error(err)
		}
	}
	bounds := func(random *rand.Rand) (string, string) {
		from := random.IntN(all)
		return historyKey(from), historyKey(from + 1 + random.IntN(4))
	}
	kinds := []func(ctx context.Context, x *Session, random *rand.Rand) error{
		func(ctx context.Context, x *Session, random *rand.Rand) error { // a transaction: the sum of a range and of a key goes to a third place
			tx, err := x.Begin(TxnOptions{Durability: Durability(1 + random.IntN(2))})
			if err != nil {
				return err
			}
			defer tx.Rollback()
			lower, upper := bounds(random)
			key, to := historyKey(random.IntN(all)), historyKey(random.IntN(all))
			c, err := tx.Scan(ScanOptions{Lower: []byte(lower), Upper: []byte(upper)})
			if err != nil {
				return err
			}
			var sum uint64
			n := 0
			for c.Next() {
				sum, n = sum+historyNumber(c.Value()), n+1
			}
			if err := c.Err(); err != nil {
				return err
			}
			c.Close()
			v, err := tx.Get(nil, []byte(key))
			if err != nil {
				return err
			}
			if v.Found {
				sum += historyNumber(v.Data)
			}
			sum += uint64(n)
			if err := tx.Set([]byte(to), historyValue(random, sum)); err != nil {
				return err
			}
			epoch, err := tx.Commit(ctx)
			if err != nil {
				return err
			}
			add(epoch, "transaction", func(state *historyState) error {
				want, n := sumOf(state.numbers, lower, upper)
				if want += state.numbers[key] + uint64(n); want != sum {
					return fmt.Errorf("[%s, %s) and %s made %d, and it has written %d", lower, upper, key, want, sum)
				}
				state.set(to, sum)
				return nil
			})
			return nil
		},
		func(ctx context.Context, x *Session, random *rand.Rand) error { // a blind put
			key, n := historyKey(random.IntN(all)), number.Add(1)
			var w Write
			w.Durability = Durability(1 + random.IntN(2))
			w.Set([]byte(key), historyValue(random, n))
			epoch, err := x.Commit(ctx, &w)
			if err == nil {
				add(epoch, "put", func(state *historyState) error { state.set(key, n); return nil })
			}
			return err
		},
		func(ctx context.Context, x *Session, random *rand.Rand) error { // a conditional put
			key, other := historyKey(random.IntN(all)), historyKey(random.IntN(all))
			present, n := random.IntN(2) == 0, number.Add(1)
			w := Write{Durability: DurabilityAsync, Conditions: []Condition{{Kind: KeyAbsent, Key: []byte(other)}}}
			if present {
				w.Conditions[0].Kind = KeyPresent
			}
			w.Set([]byte(key), historyValue(random, n))
			epoch, err := x.Commit(ctx, &w)
			if err == nil {
				add(epoch, "conditional put", func(state *historyState) error {
					if _, ok := state.numbers[other]; ok != present {
						return fmt.Errorf("%s exists: %v", other, ok)
					}
					state.set(key, n)
					return nil
				})
			}
			return err
		},
		func(ctx context.Context, x *Session, random *rand.Rand) error { // an invocation
			key, n := historyKey(random.IntN(all)), number.Add(1)
			out := make([]Invoked, 1)
			epoch, err := x.InvokeAll(ctx, []Invoke{{Kind: InvokeGetAndSet, Key: []byte(key), Operand: historyValue(random, n)}}, nil, DurabilityAsync, out)
			if err != nil {
				return err
			}
			var old uint64
			found := out[0].OldFound
			if found {
				old = historyNumber(out[0].Old)
			}
			add(epoch, "invocation", func(state *historyState) error {
				if was, ok := state.numbers[key]; ok != found || was != old {
					return fmt.Errorf("%s was %d, %v; the operation has seen %d, %v", key, was, ok, old, found)
				}
				state.set(key, n)
				return nil
			})
			return nil
		},
		func(ctx context.Context, x *Session, random *rand.Rand) error { // a range delete
			lower, upper := bounds(random)
			out, err := x.DeleteRange(ctx, RangeDelete{Lower: []byte(lower), Upper: []byte(upper), Limit: random.IntN(3), Durability: DurabilityAsync})
			if err != nil || out.Count == 0 {
				return err
			}
			add(out.Epoch, "range delete", func(state *historyState) error {
				n := 0
				for _, k := range slices.Sorted(maps.Keys(state.numbers)) {
					if k < lower || k >= upper {
						continue
					}
					if n == out.Count {
						if !out.More {
							return fmt.Errorf("%s is in [%s, %s) and was not deleted", k, lower, upper)
						}
						break
					}
					state.remove(k)
					n++
				}
				if n != out.Count {
					return fmt.Errorf("%d keys were in [%s, %s), and %d were deleted", n, lower, upper, out.Count)
				}
				return nil
			})
			return nil
		},
		func(ctx context.Context, x *Session, random *rand.Rand) error { // a check of a range that never has keys
			c := Condition{Kind: KeyAbsent, Key: []byte(historyKey(random.IntN(all)))}
			_, err := x.DeleteRange(ctx, RangeDelete{Lower: []byte("none"), Conditions: []Condition{c}})
			return err
		},
		func(ctx context.Context, x *Session, random *rand.Rand) error { // a read-modify-write under snapshot isolation, half of it rolled back
			tx, err := x.Begin(TxnOptions{Isolation: IsolationSnapshot, Durability: DurabilityAsync})
			if err != nil {
				return err
			}
			defer tx.Rollback()
			key, other, n := historyKey(random.IntN(all)), historyKey(random.IntN(all)), number.Add(1)
			v, err := tx.Get(nil, []byte(key))
			if err != nil {
				return err
			}
			var old uint64
			if v.Found {
				old = historyNumber(v.Data)
			}
			if err := tx.Set([]byte(key), historyValue(random, old+n)); err != nil {
				return err
			}
			savepoint, err := tx.Savepoint()
			if err := errors.Join(err, tx.Set([]byte(key), nil), tx.Delete([]byte(other)), tx.RollbackTo(savepoint)); err != nil {
				return err
			}
			epoch, err := tx.Commit(ctx)
			if err == nil {
				add(epoch, "read-modify-write", func(state *historyState) error {
					if was, ok := state.numbers[key]; ok != v.Found || was != old {
						return fmt.Errorf("%s was %d, %v; the operation has seen %d, %v", key, was, ok, old, v.Found)
					}
					state.set(key, old+n)
					return nil
				})
			}
			return err
		},
		func(ctx context.Context, x *Session, random *rand.Rand) error { // a snapshot, read twice with a pause between, in both directions
			var past keys.Epoch // the newest, or one that is not long ago
			if random.IntN(2) == 0 {
				past = s.Visible() - min(s.Visible(), keys.Epoch(random.IntN(100)))
			}
			at, err := x.OpenSnapshot(past)
			if errors.As(err, new(*SnapshotGoneError)) {
				return nil
			}
			if err != nil {
				return err
			}
			defer x.CloseSnapshot()
			var seen [2]map[string]uint64
			for i := range seen {
				seen[i] = map[string]uint64{}
				c, err := x.Scan(ScanOptions{Reverse: i == 1})
				if err != nil {
					return err
				}
				for c.Next() {
					seen[i][string(c.Key())] = historyNumber(c.Value())
				}
				if err := c.Err(); err != nil {
					return err
				}
				time.Sleep(time.Duration(random.IntN(3)) * time.Millisecond)
			}
			read(at, func(state *historyState) error {
				if !maps.Equal(seen[0], state.numbers) || !maps.Equal(seen[1], state.numbers) {
					return fmt.Errorf("the snapshot has seen %v, and then %v, instead of %v", seen[0], seen[1], state.numbers)
				}
				return nil
			})
			return nil
		},
		func(ctx context.Context, x *Session, random *rand.Rand) error { // a put if a range is unchanged, and another one if it is not
			holder := mustSession(t, s)
			defer holder.Close()
			since, err := holder.OpenSnapshot(0)
			if err != nil || since == 0 {
				return err
			}
			time.Sleep(time.Duration(random.IntN(500)) * time.Microsecond)
			lower, upper := bounds(random)
			key, n := historyKey(random.IntN(all)), number.Add(1)
			out, err := x.Execute(ctx, &Execution{
				Write:  &Write{Durability: DurabilityAsync},
				Ranges: []RangeCondition{{Lower: []byte(lower), Upper: []byte(upper), UnchangedSince: since}},
				Operate: func(_ context.Context, tx *Txn, holds bool) error {
					if !holds {
						return tx.Delete([]byte("unchanged"))
					}
					return tx.Set([]byte(key), historyValue(random, n))
				},
			})
			if err != nil {
				return err
			}
			add(out.Epoch, fmt.Sprintf("put if unchanged: %v", out.Holds), func(state *historyState) error {
				if state.unchangedSince(lower, upper, since) != out.Holds {
					return fmt.Errorf("[%s, %s) is unchanged since %d: %v", lower, upper, since, !out.Holds)
				}
				if out.Holds {
					state.set(key, n)
				}
				return nil
			})
			return nil
		},
	}
	deadline := time.Now().Add(duration)
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			x := mustSession(t, s)
			defer x.Close()
			for time.Now().Before(deadline) && !t.Failed() {
				ctx, cancel := context.Background(), func() {}
				if random.IntN(4) == 0 {
					ctx, cancel = context.WithTimeout(ctx, time.Duration(random.IntN(400))*time.Microsecond)
				}
				kind := 0
				if random.IntN(2) == 0 {
					kind = random.IntN(len(kinds))
				}
				if err := kinds[kind](ctx, x, random); err != nil {
					failed(err)
				}
				cancel()
			}
		})
	}
	wg.Go(func() { // bulk loads
		random := rand.New(rand.NewPCG(seed, 1000))
		for time.Now().Before(deadline) && !t.Failed() {
			if err := historyLoad(s, random, all, &number, add); err != nil {
				failed(err)
			}
			time.Sleep(time.Duration(random.Int64N(int64(6 * pause))))
		}
	})
	wg.Go(func() { // checkpoints
		for time.Now().Before(deadline) && !t.Failed() {
			if err := s.Checkpoint(context.Background()); err != nil {
				t.Error(err)
			}
			time.Sleep(pause)
		}
	})
	wg.Wait()
	slices.SortFunc(history, func(a, b historyStep) int {
		return cmp.Or(cmp.Compare(a.epoch, b.epoch), map[bool]int{true: 1, false: -1}[a.read]-map[bool]int{true: 1, false: -1}[b.read])
	})
	state, counts := historyState{numbers: map[string]uint64{}, changed: map[string]keys.Epoch{}}, map[string]int{}
	for i, step := range history {
		if i > 0 && history[i-1].epoch == step.epoch && !step.read {
			t.Fatalf("epoch %d was given to a %s and a %s", step.epoch, history[i-1].what, step.what)
		}
		state.epoch = step.epoch
		if err := step.apply(&state); err != nil {
			t.Fatalf("the %s of epoch %d, after the %s of epoch %d: %v", step.what, step.epoch, history[max(0, i-1)].what, history[max(0, i-1)].epoch, err)
		}
		counts[step.what]++
	}
	stats := s.engine.Stats()
	t.Logf("%v; %d conflicts, %d contexts that ended; %d rotations, %d versions pruned", counts, conflicts.Load(), ended.Load(), stats.Rotations, stats.Pruning.Pruned)
	final := map[string]uint64{}
	for k, v := range dump(t, s) {
		final[k] = historyNumber([]byte(v))
	}
	if !maps.Equal(final, state.numbers) {
		t.Fatalf("the store has %v\nand the commits give %v", final, state.numbers)
	}
}

// historyLoad loads a few of the keys.
func historyLoad(s *Store, random *rand.Rand, all int, number *atomic.Uint64, add func(keys.Epoch, string, func(*historyState) error)) error {
	load, err := s.BeginBulkLoad()
	if err != nil {
		return err
	}
	entries := map[string]uint64{}
	for range 1 + random.IntN(3) {
		entries[historyKey(random.IntN(all))] = number.Add(1)
	}
	for k, n := range entries {
		if err := load.Add([]byte(k), historyValue(random, n)); err != nil {
			return errors.Join(err, load.Close())
		}
	}
	loaded, err := load.Commit(context.Background())
	if err == nil {
		add(loaded.Epoch, "bulk load", func(state *historyState) error {
			for k, n := range entries {
				state.set(k, n)
			}
			return nil
		})
	}
	return errors.Join(err, load.Close())
}
