package enginetest

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

var loadStormRounds = flag.Int("loadstorm.rounds", 12, "how many stores TestBulkLoadsDuringCommitsSurviveCrashesInARow crashes, six times each")

// storm is what one client knows of a store that crashes repeatedly, while bulk loads run during
// the client's commits.
type storm struct {
	base    map[string]string // what the last start found
	commits []stormCommit     // since then, in order
	load    map[string]string // the one that may have come to its switch; nil without one
	loaded  keys.Epoch        // its epoch, if it said so
	before  keys.Epoch        // visible when it began
}

type stormCommit struct {
	epoch keys.Epoch
	sets  map[string]string // "" deletes
	acked bool              // as SYNC
}

// states are the contents that may have survived: the commits up to one of them, with the bulk load
// at its epoch.
func (m *storm) states() (all []map[string]string) {
	now, least, loaded := maps.Clone(m.base), 0, false
	var list []map[string]string
	add := func(must bool) {
		list = append(list, maps.Clone(now))
		if must {
			least = len(list) - 1
		}
	}
	takeLoad := func(must bool) {
		loaded = true
		maps.Copy(now, m.load)
		add(must)
	}
	add(true)
	for _, c := range m.commits {
		if m.load != nil && !loaded && (m.loaded != 0 && c.epoch > m.loaded || m.loaded == 0 && c.epoch > m.before+1<<27) {
			takeLoad(m.loaded != 0)
		}
		for k, v := range c.sets {
			if now[k] = v; v == "" {
				delete(now, k)
			}
		}
		add(c.acked)
	}
	if m.load != nil && !loaded {
		takeLoad(m.loaded != 0)
	}
	return list[least:]
}

func (m *storm) work(s *mvcc.Store, rng *rand.Rand) {
	var beside sync.WaitGroup
	defer beside.Wait()
	m.before = s.Visible()
	loading := context.Background()
	if rng.IntN(3) == 0 {
		var cancel context.CancelFunc
		loading, cancel = context.WithTimeout(loading, time.Duration(rng.IntN(20_000))*time.Microsecond)
		defer cancel()
	}
	entries := entriesFor(fmt.Sprint("load", rng.IntN(1000)), 1+rng.IntN(1500), 1+rng.IntN(3), rng)
	checkpoints := rng.IntN(2) == 0
	l, err := s.BeginBulkLoad()
	if err != nil {
		return
	}
	m.load = entries
	beside.Go(func() {
		defer func() { _ = l.Close() }()
		for k, v := range entries {
			if l.Add([]byte(k), []byte(v)) != nil {
				return
			}
		}
		if out, err := l.Commit(loading); err == nil {
			m.loaded = out.Epoch
		}
	})
	if checkpoints {
		beside.Go(func() { _ = s.Checkpoint(context.Background()) })
	}
	x, err := openSession(s)
	if err != nil {
		return
	}
	defer x.Close()
	for range 100 + rng.IntN(400) {
		c := stormCommit{sets: map[string]string{}}
		for range 1 + rng.IntN(6) {
			k := fmt.Sprintf("key-%05d", rng.IntN(1500))
			if c.sets[k] = ""; rng.IntN(4) > 0 {
				c.sets[k] = fmt.Sprint(rng.IntN(1e6), strings.Repeat("w", rng.IntN(300)))
				if rng.IntN(20) == 0 {
					c.sets[k] += strings.Repeat("W", 20_000)
				}
			}
		}
		w := mvcc.Write{Durability: []mvcc.Durability{mvcc.DurabilityAsync, mvcc.DurabilitySync}[rng.IntN(2)]}
		for k, v := range c.sets {
			if v == "" {
				w.Delete([]byte(k))
			} else {
				w.Set([]byte(k), []byte(v))
			}
		}
		var err error
		if c.epoch, err = x.Commit(context.Background(), &w); err != nil {
			return
		}
		m.commits = append(m.commits, c)
		if s.Wait(context.Background(), c.epoch, w.Durability) != nil {
			return
		}
		m.commits[len(m.commits)-1].acked = w.Durability == mvcc.DurabilitySync
	}
}

// TestBulkLoadsDuringCommitsSurviveCrashesInARow makes bulk loads while a client commits, cuts the
// power at a random operation, and continues with the files, several times. After each crash the
// store has all acknowledged commits, a prefix of the others, and the whole bulk load, at its
// epoch, or nothing of it.
func TestBulkLoadsDuringCommitsSurviveCrashesInARow(t *testing.T) {
	seed := crashTestSeed(t)
	for round := range uint64(max(*loadStormRounds/thinned, 1)) {
		rng := rand.New(rand.NewPCG(seed, round))
		fs := vfs.NewMem()
		m := &storm{base: map[string]string{}}
		for crash := range 6 {
			if crash > 0 { // the first start is on an empty disk
				fs.CrashAt(fs.Mutations() + 1 + int64(rng.IntN(12)))
				if s, err := mvcc.Open(tiny(fs)); err == nil { // and it may crash in the middle of that
					_ = s.Close()
				}
				fs = fs.Crash(rng.Uint64(), vfs.Survival(rng.IntN(3)))
			}
			s, err := mvcc.Open(tiny(fs))
			if err != nil {
				t.Fatalf("seed %d, round %d, after crash %d: %v", seed, round, crash, err)
			}
			mustVerify(t, s)
			got := dump(t, s)
			states := m.states()
			if !slices.ContainsFunc(states, func(want map[string]string) bool { return maps.Equal(want, got) }) {
				t.Fatalf("seed %d, round %d, after crash %d: none of %d states; the first: %v; the last: %v", seed, round, crash,
					len(states), equalMaps(states[0], got), equalMaps(states[len(states)-1], got))
			}
			m = &storm{base: got}
			fs.CrashAt(fs.Mutations() + 1 + int64(rng.IntN(500)))
			m.work(s, rng)
			_ = s.Close()
			fs = fs.Crash(rng.Uint64(), vfs.Survival(rng.IntN(3)))
		}
	}
}

// TestSnapshotsKeepTheirVersionsThroughABulkLoad: a bulk load drops the versions that it merges
// only if no snapshot sees them.
func TestSnapshotsKeepTheirVersionsThroughABulkLoad(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	var sessions []*session
	for i := range 5 {
		mustPut(t, s, "a", fmt.Sprint("put ", i))
		mustPut(t, s, "beside", fmt.Sprint("put ", i))
		x := mustSession(t, s)
		defer x.Close()
		if _, err := x.OpenSnapshot(0); err != nil {
			t.Fatal(err)
		}
		sessions = append(sessions, x)
		mustPut(t, s, "a", "seen by nobody")
		mustPut(t, s, "beside", "seen by nobody")
	}
	mustLoad(t, s, map[string]string{"a": "loaded", "b": "loaded"})
	for i, x := range sessions {
		for _, key := range []string{"a", "beside"} {
			if v, err := x.Read(nil, []byte(key)); err != nil || string(v.Data) != fmt.Sprint("put ", i) {
				t.Errorf("snapshot %d: %s is %q, %v", i, key, v.Data, err)
			}
		}
	}
}
